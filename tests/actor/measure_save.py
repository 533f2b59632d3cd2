"""Measure how long training waits for a save: our thread against Megatron's forked worker.

Run it from the repository: PYTHONPATH=.:tests/actor python tests/actor/measure_save.py. Model: 27.8M parameters in
float32 (334 MB of state) on one rank and one thread; an update takes half a second.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from arpo_megatron.actor import parallel, training_state
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.checkpoint import CheckpointStore
from arpo_megatron.config import OptimizerConfig, ParallelConfig
from arpo_megatron.packing.packs import pack_trees
from tests.actor import cases

SAVES = 3


def timed(name: str, begin: Callable[[], object], over: Callable[[], object], update: Callable[[], object]) -> None:
    started = time.monotonic()
    begin()
    pause, updates = time.monotonic() - started, 0
    while not over():
        update()
        updates += 1
    total = time.monotonic() - started
    print(
        f"{name}: training waits {pause:.2f} s; written after {total:.2f} s, {updates} update(s) meanwhile", flush=True
    )


def main() -> None:
    parallel.initialize(ParallelConfig(), seed=1)
    torch.set_num_threads(1)
    sizes = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1408, "vocabulary": 2048}
    spec = replace(cases.QWEN3, **sizes)
    actor = Actor(cases.job(), spec, None, optimizer=OptimizerConfig(lr=1e-4), total_updates=10)
    packs = pack_trees(*cases.minibatch(0, count=8), token_budget=1000)
    actor.update(packs, None)
    torch.cuda.set_device = lambda device: None  # Megatron's forked worker calls it
    queue = AsyncCallsQueue(persistent=False)

    def fork(directory: Path) -> None:
        state, _ = training_state._template(actor.chunks, actor.optimizer, actor.scheduler, with_rng=True)
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
        queue.schedule_async_request(dist_checkpointing.save(state, str(directory), strategy, async_sharded_save=True))

    def forked_over() -> bool:
        queue.maybe_finalize_async_calls(blocking=False)
        return not queue.get_num_unfinalized_calls()

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = CheckpointStore(root / "ours", keep=2)
        for number in range(SAVES):
            timed("thread", lambda n=number: store.save(n, actor, {}), store.reports, lambda: actor.update(packs, None))
        for number in range(SAVES):
            (root / f"{number}").mkdir()
            timed("fork", lambda n=number: fork(root / f"{n}"), forked_over, lambda: actor.update(packs, None))
        queue.close()
    parallel.destroy()


if __name__ == "__main__":
    main()
