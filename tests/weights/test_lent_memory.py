"""Colocated engines: what happens on which rank before an engine takes its memory back."""

import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.sync import PushSettings, WeightSync
from tests.models.tiny_models import make
from tests.ranks import run_ranks

RANKS = ParallelConfig(data=2)


def push_and_spy(root: Path) -> None:
    """Push with doubles of allocator and engines; every rank appends what it does to one file."""
    from arpo_megatron.actor import parallel
    from arpo_megatron.actor.model import build_chunks

    parallel.initialize(RANKS, seed=1)
    spec = ModelSpec.from_hf(root / "model")
    chunks = build_chunks(spec, RANKS, torch.float32)
    control = Control(parallel.group("control"))
    log = os.open(root / "order", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def spy(name: str, result: Any = None) -> Any:
        def called(*arguments: Any) -> Any:
            words = " ".join(arguments) if name == "resume" else ""
            os.write(log, f"{name} {words or control.rank}\n".encode())
            return result

        return called

    gc.collect, torch.cuda.empty_cache = spy("collect", 0), spy("empty")
    requests: Any = SimpleNamespace(
        resume_memory=spy("resume"), begin_push=spy("begin", ()), commit_push=spy("commit"), close=lambda: None
    )
    sync = WeightSync(control, requests, chunks, spec, PushSettings(colocated=True, verify_every=3))
    transport = SimpleNamespace(send=lambda: spy("send")() or 1, close=lambda: None, largest_buffer=0)
    sync._connect = lambda _: setattr(sync, "_transport", transport)  # type: ignore[method-assign, func-returns-value]
    for version in (1, 2):
        sync.push(version)
    parallel.destroy()


def test_every_rank_frees_its_cache_before_an_engine_takes_memory_back(tmp_path: Path) -> None:
    """Then come the weights' memory, the push, and the KV cache's memory, at every push."""
    make(tmp_path / "model", "qwen3-tied")
    run_ranks(push_and_spy, tmp_path, ranks=2)
    lines = (tmp_path / "order").read_text().splitlines()
    half = len(lines) // 2
    for push in (lines[:half], lines[half:]):
        freed, rest = push[:4], push[4:]
        assert sorted(freed) == ["collect 0", "collect 1", "empty 0", "empty 1"]
        assert all(freed.index(f"collect {rank}") < freed.index(f"empty {rank}") for rank in range(2))
        assert [line.split()[0] for line in rest] == ["resume", "begin", "send", "send", "resume", "commit"]
        assert [line for line in rest if line.startswith("resume")] == ["resume weights", "resume kv_cache cuda_graph"]
