"""The real SGLang server: its numbers equal those of transformers, and no process outlives its launcher."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import requests
import torch

from arpo_megatron.engine.admin import EngineAdmin
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.function_calls import CallParser, ParsedTurn
from arpo_megatron.engine.launch import EngineHandle, EngineStartError, launch_engine
from arpo_megatron.engine.request import EngineFinish, EngineRefusedError, Generation, Sampling
from arpo_megatron.errors import UserError
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS
from tests.engine.fixtures import ENGINE, is_running

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the expectations are those of float32 on a CPU")

PROMPT = list(range(13, 28)) * 3
PYTHON_ENDS = {4, 9, 10, 12}  # tokens of the tiny model that hold </python>, two of them with other text around it
SEARCH_ENDS = {6, 11}
T = TypeVar("T")


def ask(engine: EngineHandle, question: Callable[[EngineClient], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        async with EngineClient(engine.url) as client:
            return await question(client)

    return asyncio.run(run())


def test_greedy_equals_transformers(engine: EngineHandle, reference: Callable[[list[int]], torch.Tensor]) -> None:
    drawn = ask(engine, lambda client: client.generate(PROMPT, max_new_tokens=40, sampling=Sampling(0.0)))
    ids = PROMPT + drawn.token_ids.tolist()
    logits = reference(ids)[len(PROMPT) - 1 : -1]
    assert drawn.token_ids.tolist() == logits.argmax(-1).tolist()
    chosen = logits.log_softmax(-1).gather(-1, torch.tensor(drawn.token_ids, dtype=torch.int64)[:, None])[:, 0]
    np.testing.assert_allclose(drawn.logprobs, chosen, atol=1e-4)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8)])
def test_logprobs_and_entropies_cover_the_whole_vocabulary(
    engine: EngineHandle, reference: Callable[[list[int]], torch.Tensor], temperature: float, top_p: float
) -> None:
    async def draw(client: EngineClient) -> list[Generation]:
        sampling = Sampling(temperature, top_p)
        prompts = [PROMPT[: 9 + start] for start in range(12)]  # of different lengths, decoded in one batch
        return await asyncio.gather(
            *(client.generate(prompt, max_new_tokens=30, sampling=sampling) for prompt in prompts)
        )

    for start, drawn in enumerate(ask(engine, draw)):
        prompt = PROMPT[: 9 + start]
        logits = reference(prompt + drawn.token_ids.tolist())[len(prompt) - 1 : -1] / temperature
        distribution = torch.distributions.Categorical(logits=logits)
        np.testing.assert_allclose(drawn.entropies, distribution.entropy(), atol=1e-4)
        np.testing.assert_allclose(drawn.logprobs, distribution.log_prob(torch.tensor(drawn.token_ids)), atol=1e-4)


def test_parser_of_the_engine_reads_the_calls_of_a_turn(engine: EngineHandle) -> None:
    functions = [tool.function() for tool in DEFAULT_TOOLS]
    call = '<tool_call>\n{"name": "%s", "arguments": {"query": "x"}}\n</tool_call>'

    async def parse(text: str) -> ParsedTurn:
        async with CallParser(engine.url) as parser:
            return await parser(text, functions, "qwen25")

    found = asyncio.run(parse(f"Let me see. {call % 'search'}"))
    assert [(each.name, json.loads(each.arguments)) for each in found.calls] == [("search", {"query": "x"})]
    assert asyncio.run(parse("It is 4.")) == ParsedTurn("It is 4.", ())
    for broken in ("<tool_call>\n{\n</tool_call>", call % "unknown"):
        turn = asyncio.run(parse(broken))
        assert turn.calls == () and turn.text != broken


def test_scores_equal_transformers_and_ignore_the_cache(
    engine: EngineHandle, reference: Callable[[list[int]], torch.Tensor]
) -> None:
    ids = [*PROMPT, 3, 15, 25, 4]
    expected = reference(ids).log_softmax(-1)[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    engines = EngineAdmin([engine.url], timeout_s=60.0)
    for _ in range(2):
        (logprobs,) = engines.start_logprobs(ids)()
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    engines.close()


def test_prefilled_prefix_is_served_from_the_cache(engine: EngineHandle) -> None:
    prompt = [20, 19, 14, 17] * 50

    async def fork(client: EngineClient) -> tuple[tuple[int, int], list[int]]:
        first = await client.prefill(prompt)
        drawn = (client.generate(prompt, max_new_tokens=5, sampling=Sampling()) for _ in range(8))
        return first, [part.cached_tokens for part in await asyncio.gather(*drawn)]

    assert ask(engine, fork) == ((200, 0), [199] * 8)


def test_each_finish_reason_keeps_its_tokens(engine: EngineHandle) -> None:
    async def draw(client: EngineClient) -> list[Generation]:
        stop = ("</python>", "</search>")
        drawn = (client.generate(PROMPT, max_new_tokens=20, sampling=Sampling(), stop=stop) for _ in range(200))
        return await asyncio.gather(*drawn)

    seen = set()
    for drawn in ask(engine, draw):
        seen.add((drawn.finish, drawn.matched))
        ids = drawn.token_ids.tolist()
        if drawn.finish is EngineFinish.LENGTH:
            assert len(ids) == 20
        elif drawn.finish is EngineFinish.END_TOKEN:
            assert ids[-1] == 1
        else:
            assert ids[-1] in {"</python>": PYTHON_ENDS, "</search>": SEARCH_ENDS}[str(drawn.matched)]
            assert not {1, *PYTHON_ENDS, *SEARCH_ENDS} & set(ids[:-1])
    assert seen == {
        (EngineFinish.LENGTH, None),
        (EngineFinish.END_TOKEN, None),
        (EngineFinish.STOP_STRING, "</python>"),
        (EngineFinish.STOP_STRING, "</search>"),
    }


def test_too_long_request_is_refused(engine: EngineHandle) -> None:
    with pytest.raises(EngineRefusedError, match="HTTP 400"):
        ask(engine, lambda client: client.prefill(PROMPT * 100))


@pytest.mark.parametrize("streams", [False, True])
def test_prompt_that_leaves_no_room_is_refused(engine: EngineHandle, streams: bool) -> None:
    """SGLang reserves a few positions: it aborts a request that the context would hold."""

    async def ask_once() -> Generation:
        async with EngineClient(engine.url, streams=streams) as client:
            return await client.generate(PROMPT[:1] * 2045, max_new_tokens=1, sampling=Sampling())

    with pytest.raises(EngineRefusedError, match="exceeds"):
        asyncio.run(asyncio.wait_for(ask_once(), 60))


def test_failed_start_reports_the_log_and_leaves_no_process(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    with pytest.raises(UserError, match=r"config\.json is missing"):
        launch_engine(tmp_path, ENGINE, dtype="float32", seed=1, log_path=log)
    (tmp_path / "config.json").write_text('{"model_type": "a-model-of-no-family"}')
    with pytest.raises(EngineStartError, match="ended with code") as error:
        launch_engine(tmp_path, ENGINE, dtype="float32", seed=1, log_path=log)
    assert str(log) in str(error.value)
    assert "a-model-of-no-family" in str(error.value)
    assert engine_processes(str(tmp_path)) == []


LAUNCHER = """
import sys
from pathlib import Path
from arpo_megatron.config import EngineConfig
from arpo_megatron.engine.launch import launch_engine
from arpo_megatron.rollout.messages import ServiceSettings
from tests.rollout.launched import launched_rollouts
model, log = map(Path, sys.argv[1:])
config = EngineConfig(max_total_tokens=4096, memory_fraction=0.1, startup_timeout_s=400)
launched = launched_rollouts(ServiceSettings(("http://127.0.0.1:9",), "http://127.0.0.1:9", model, seed=1))
rollouts = launched.__enter__()
print("launching", flush=True)
engine = launch_engine(model, config, dtype="float32", seed=1, log_path=log)
print("ready", flush=True)
sys.stdin.read()
"""


def engine_processes(word: str) -> list[psutil.Process]:
    """Return processes of this project with `word` in their command line, and their descendants."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if "arpo_megatron." in line and word in line:
                found += [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("moment", [pytest.param("while it starts", marks=pytest.mark.slow_campaign), "when it serves"])
def test_engine_dies_with_its_launcher(tiny_model: Path, tmp_path: Path, moment: str) -> None:
    model = tmp_path / "model"
    model.symlink_to(tiny_model)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(model), str(tmp_path / "log")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # helper modules of the tests, too
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    try:
        assert launcher.stdout.readline() == "launching\n"
        if moment == "when it serves":
            assert launcher.stdout.readline() == "ready\n"
        else:
            time.sleep(3)
        give_up, least = time.monotonic() + 60, 4 if moment == "when it serves" else 2
        while len(family := psutil.Process(launcher.pid).children(recursive=True)) < least:
            assert time.monotonic() < give_up, family
            time.sleep(0.05)
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        launcher.stdin.close()
        launcher.stdout.close()
    # Also those that the family has started since.
    _gone, alive = psutil.wait_procs([*family, *engine_processes(str(model))], timeout=60)
    assert [process for process in alive if is_running(process)] == []
    assert engine_processes(str(model)) == []


def test_cpu_stubs_refuse_another_sglang_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    from arpo_megatron.engine.server.cpu import install_stubs

    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "9.9.9")
    with pytest.raises(UserError, match=r"0\.5\.18, not 9\.9\.9"):
        install_stubs()


def test_health_probe_notices_a_hanging_detokenizer(engine: EngineHandle) -> None:
    def alive(timeout_s: float) -> int:
        return requests.get(engine.spec.url + engine.spec.alive, timeout=timeout_s).status_code

    (detokenizer,) = [
        child
        for child in psutil.Process(engine.process.pid).children(recursive=True)
        if "detokenizer" in " ".join(child.cmdline())
    ]
    assert alive(60) == 200
    detokenizer.suspend()
    try:
        assert requests.get(f"{engine.url}/server_info", timeout=60).status_code == 200
        with pytest.raises(requests.Timeout):
            alive(1)
    finally:
        detokenizer.resume()
    assert alive(60) == 200
    assert ask(engine, lambda client: client.prefill(PROMPT))[0] == len(PROMPT)


def test_metrics_are_served(engine: EngineHandle) -> None:
    with urllib.request.urlopen(f"{engine.url}/metrics") as answer:
        assert b"sglang:cached_tokens_total" in answer.read()
    with urllib.request.urlopen(f"{engine.url}/server_info") as answer:
        info = json.load(answer)
    assert (info["device"], info["attention_backend"], info["page_size"]) == ("cpu", "torch_native", 1)
