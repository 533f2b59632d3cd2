"""torchrun script of test_kill_campaign.py: ten steps of training, resumed where they stopped, killed at a moment.

Arguments: a directory, the name of a layout, and the moment as JSON, null to train to the end. The first attempt also
makes the undisturbed run, in memory.

A moment: {"rank", "step", "point", "delay_s"}. Points: "update" and "save" kill `delay_s` after the step's update or
save has begun; "shard" (this rank's file is there), "joined" (the leader begins to join the parts) and "renamed" (it
counts) as soon as the step's save has come so far.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cases
import torch
import torch.distributed as dist
import xxhash
from megatron.core import tensor_parallel

from arpo_megatron.actor import optimizer_state, parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.checkpoint import CheckpointStore
from arpo_megatron.actor.packing import pack_trees
from arpo_megatron.config import OptimizerConfig, ParallelConfig

STEPS = 10
LAYOUTS = {"alone": ParallelConfig(), "data": ParallelConfig(data=2, distributed_optimizer=True)}
APPEARS = {"shard": "step_{}.tmp/actor/__{}_0.distcp", "joined": "step_{}.tmp/state.json", "renamed": "step_{}"}


def new_actor(layout: ParallelConfig) -> Actor:
    torch.manual_seed(3)
    tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    config = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_fraction=0.2, weight_decay=0.1)
    return Actor(cases.job(layout, "bfloat16"), cases.QWEN3, None, optimizer=config, total_updates=STEPS)


def update(actor: Actor, step: int) -> None:
    packs = pack_trees(*cases.minibatch(step, count=4), token_budget=120, ranks=actor.config.parallel.data)
    actor.update(packs, actor.logprobs(packs))


def digest(actor: Actor) -> list[str]:
    """Of every rank's weights, moments, master weights and generators, bit for bit."""
    found = xxhash.xxh3_128()
    tensors = list(actor.model.parameters())
    for holding in optimizer_state.holdings(actor.optimizer):
        tensors += holding.tensors.values()
    for tensor in [*tensors, torch.get_rng_state()]:
        found.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    found.update(f"{optimizer_state.steps(actor.optimizer)} {actor.updates_done}".encode())
    return parallel.gather_objects(found.hexdigest())


class Killer:
    """Kills this process with -9 at its moment."""

    def __init__(self, root: Path, moment: dict[str, Any] | None) -> None:
        self.root = root
        self.moment = moment if moment and moment["rank"] == dist.get_rank() else None

    def begins(self, point: str, step: int) -> None:
        """The update or the save of a step begins."""
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


def main() -> None:
    root, layout = Path(sys.argv[1]), LAYOUTS[sys.argv[2]]
    parallel.initialize(layout, seed=1)
    torch.set_num_threads(1)
    if not (root / "straight.json").exists():
        straight = new_actor(layout)
        for step in range(STEPS):
            update(straight, step)
        whole = digest(straight)
        if parallel.is_leader():
            (root / "straight.json").write_text(json.dumps(whole))
    partial = sorted(path.name for path in (root / "checkpoints").glob("*.tmp"))
    store = CheckpointStore(root / "checkpoints", keep=2)
    killer = Killer(store.root, json.loads(sys.argv[3]))
    actor, found, done = new_actor(layout), store.resume_point(), 0
    if found.path is not None:
        actor.load(store.actor_directory(found.path))
        done = store.load_state(found.path)["step"]
    if parallel.is_leader():
        with (root / "attempts.jsonl").open("a") as file:
            file.write(json.dumps({"resumed": done, "refused": found.told, "partial": partial}) + "\n")
    for step in range(done + 1, STEPS + 1):
        killer.begins("update", step)
        update(actor, step - 1)
        killer.begins("save", step)
        store.save(step, actor, {"step": step})
    store.finish()
    result = digest(actor)
    if parallel.is_leader():
        assert not any(report.error for report in store.reports())
        (root / "result.json").write_text(json.dumps(result))
    parallel.destroy()


if __name__ == "__main__":
    main()
