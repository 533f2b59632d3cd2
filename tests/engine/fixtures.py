"""A tiny random model, a running engine with it, the tool service, and a server for scripted engines (`scripted`)."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from aiohttp import web

from arpo_megatron.bench.tool_calling_model import random_qwen3
from arpo_megatron.config import EngineConfig
from arpo_megatron.engine.launch import EngineHandle, launch_engine
from tests.engine.scripted import ScriptedEngine

if TYPE_CHECKING:
    from torch import Tensor

ENGINE = EngineConfig(max_total_tokens=65536, memory_fraction=0.1, max_running_requests=64, startup_timeout_s=400)
"""Sizes of engines in tests."""

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def scripted_engine() -> Iterator[Callable[[ScriptedEngine], ScriptedEngine]]:
    """Serve `ScriptedEngine`s from a thread with an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runners: list[web.AppRunner] = []

    async def serve(engine: ScriptedEngine) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", engine.generate)
        app.router.add_get("/model_info", engine.model_info)
        app.router.add_get("/server_info", engine.server_info)
        app.router.add_get("/health", engine.done)
        for path in ("/abort_request", "/flush_cache"):
            app.router.add_post(path, engine.done)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    def start(engine: ScriptedEngine) -> ScriptedEngine:
        asyncio.run_coroutine_threadsafe(serve(engine), loop).result(10)
        return engine

    yield start
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture(scope="session")
def sandbox_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real tool service; its search has no documents, its python has sessions for those who ask."""
    config = tmp_path_factory.mktemp("sandbox") / "config.yaml"
    config.write_text("python: {preload: [], session_dir: states}\n")
    command = [sys.executable, "-m", "tools_sandbox", "--port", "0", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1]
        process.terminate()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of 28 tokens: digits, signs, tags, and whole tool calls, so that it often makes one by chance.

    In one of them, and in another that only ends a call, the tag is not the whole token, as in real vocabularies.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny") / "model"
    tags = ["<python>", "</python>", "<search>", "</search>", "<result>", "</result>"]
    calls = ["<python>1+1</python>", "<python>2*3</python>\n", "<search>7</search>", " 9</python>"]
    words = ["<pad>", "<eos>", "<unk>", *tags, *calls, *" \n0123456789+*-"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    random_qwen3(len(words), eos=1, pad=0, positions=2048, spread=0.1).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    """A running engine with the tiny model, whose weights and version tests leave unchanged."""
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    before = set(SHARED_MEMORY.glob("sglang*"))
    handle = launch_engine(tiny_model, ENGINE, dtype="float32", seed=1, log_path=log)
    server = psutil.Process(handle.process.pid)
    family = [server, *server.children(recursive=True)]
    assert len(family) >= 3  # server, scheduler, detokenizer
    yield handle
    handle.stop()
    assert not handle.alive()
    assert not any(map(is_running, family))
    assert not handle.scratch.path.exists()
    assert set(SHARED_MEMORY.glob("sglang*")) <= before
    handle.stop()


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> "Callable[[list[int]], Tensor]":
    """A function of token ids: float64[n, V] logits of transformers for the tiny model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).double()

    def logits(ids: list[int]) -> "Tensor":
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]

    return logits


def is_running(process: psutil.Process) -> bool:
    """Return whether a process exists and is no zombie."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
