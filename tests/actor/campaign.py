"""Training for test_kill_campaign.py: ten steps that are killed at a given moment, and resumed.

A step is that of train.py with generated trees instead of sampled ones. Rank 0 draws tasks from the `EpochSelector`;
all ranks share its batch, compute log-probs and update. The `RunState` of a real job is saved with the actor.
"""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from megatron.core import tensor_parallel

from arpo_megatron.actor import optimizer_state, parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.checkpoint import CheckpointStore
from arpo_megatron.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, TrainConfig
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import EpochSelector
from arpo_megatron.trainer.batch import broadcast_batches, build_batches, finish_credit
from arpo_megatron.trainer.run import RunState
from tests.actor import cases

STEPS = 10
TASKS = [Task(str(number), (), "", "math", "") for number in range(11)]
"""Few enough that steps cross the end of an epoch."""
LAYOUTS = {
    "data": ParallelConfig(data=2, distributed_optimizer=True),
    "experts": ParallelConfig(data=2, expert=2, distributed_optimizer=True),
}
APPEARS = {"shard": "step_{}.tmp/actor/__{}_0.distcp", "joined": "step_{}.tmp/state.json", "renamed": "step_{}"}


def new_actor(kind: str) -> Actor:
    torch.manual_seed(3)
    tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    config = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_fraction=0.2, weight_decay=0.1)
    spec = cases.QWEN3_MOE if kind == "experts" else cases.QWEN3
    job = cases.job(
        LAYOUTS[kind],
        "bfloat16",
        balance=0.5 if spec.experts else 0.0,  # its gradient follows from the load that the pass before has measured
        max_length=120,
        algorithm=AlgorithmConfig(sampling_correction="tis"),
        train=TrainConfig(token_budget=120),
    )
    return Actor(job, spec, None, optimizer=config, total_updates=STEPS)


@dataclass
class Training:
    """State of a run on one rank."""

    actor: Actor
    selector: EpochSelector = field(default_factory=lambda: EpochSelector(TASKS, seed=5))
    state: RunState = field(default_factory=RunState)

    def resume(self, path: Path) -> None:
        self.actor.load(CheckpointStore.actor_directory(path))
        self.state = RunState(**CheckpointStore.load_state(path))
        self.selector.load_state_dict(self.state.selector)

    def step(self) -> None:
        actor, config = self.actor, self.actor.config
        mine = []
        if parallel.is_rank_zero():
            mine = build_batches([scored(task) for task in self.selector.next_batch(4)], config, actor.spec)
        (batch,) = broadcast_batches(mine)
        old = actor.logprobs(batch.packs)
        ready = finish_credit(actor, batch, old, config, on_policy=True)
        stats = actor.update(ready.packs, ready.old_logprobs, ready.loss)
        self.state.step += 1
        for name, value in (("tokens", stats.tokens), ("loss", stats.loss)):
            self.state.totals[name] = self.state.totals.get(name, 0.0) + value
        if parallel.is_rank_zero():
            self.state.selector = self.selector.state_dict()

    def digest(self) -> list[str]:
        """Hash every rank's weights, expert loads, moments, master weights, generators and crash state, bit for bit."""
        found = xxhash.xxh3_128()
        tensors = [tensor for chunk in self.actor.chunks for tensor in [*chunk.parameters(), *chunk.buffers()]]
        for state in optimizer_state.weight_states(self.actor.optimizer):
            tensors += state.tensors.values()
        for tensor in [*tensors, torch.get_rng_state()]:
            found.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        counts = [optimizer_state.adam_steps(self.actor.optimizer), self.actor.updates_done]
        found.update(json.dumps([counts, asdict(self.state) if parallel.is_rank_zero() else None]).encode())
        return parallel.gather_objects(found.hexdigest())


def scored(task: Task) -> ScoredTree:
    """Make a tree for the task, with rewards for its leaves."""
    tree = cases.grown(int(task.id))
    rewards = cases.dyadic_advantages(tree, int(task.id))
    return ScoredTree(task, tree, rewards, rewards, np.ones(len(rewards), bool))


class Killer:
    """Kills this process with SIGKILL at a given moment."""

    def __init__(self, root: Path, moment: dict[str, Any] | None) -> None:
        self.root = root
        self.moment = moment if moment and moment["rank"] == dist.get_rank() else None

    def begins(self, point: str, step: int) -> None:
        """Report that the update or the save of a step begins."""
        if self.moment is None or self.moment["step"] != step:
            return
        wanted = self.moment["point"]
        if wanted == point or (point == "save" and wanted in APPEARS):
            threading.Thread(target=self._kill, args=(wanted, step), daemon=True).start()

    def _kill(self, point: str, step: int) -> None:
        if point in APPEARS:
            sys.setswitchinterval(1e-4)
            sought = self.root / APPEARS[point].format(step, dist.get_rank())
            while not sought.exists() and not (self.root / APPEARS["renamed"].format(step)).exists():
                time.sleep(1e-4)
        else:
            time.sleep(self.moment["delay_s"])
        os.kill(os.getpid(), signal.SIGKILL)


def main(root: Path, kind: str, moment: dict[str, Any] | None) -> None:
    """Train to the end or to the kill at `moment`, from the newest checkpoint under `root`."""
    parallel.initialize(LAYOUTS[kind], seed=1)
    torch.set_num_threads(1)
    if not (root / "straight.json").exists():
        straight = Training(new_actor(kind))
        for _ in range(STEPS):
            straight.step()
        whole = straight.digest()
        if parallel.is_rank_zero():
            (root / "straight.json").write_text(json.dumps(whole))
    partial = sorted(path.name for path in (root / "checkpoints").glob("*.tmp"))
    store = CheckpointStore(root / "checkpoints", keep=2)
    killer = Killer(store.root, moment)
    run, found = Training(new_actor(kind)), store.resume_point()
    if found.path is not None:
        run.resume(found.path)
    if parallel.is_rank_zero():
        row = {"resumed": run.state.step, "epoch": run.selector.epoch, "refused": found.warnings, "partial": partial}
        with (root / "attempts.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    for step in range(run.state.step + 1, STEPS + 1):
        killer.begins("update", step)
        run.step()
        killer.begins("save", step)
        store.save(step, run.actor, asdict(run.state))
    store.finish()
    result = run.digest()
    if parallel.is_rank_zero():
        assert not any(report.error for report in store.reports())
        (root / "result.json").write_text(json.dumps(result))
    parallel.destroy()
