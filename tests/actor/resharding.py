"""torchrun script of test_resharding.py: each layout of four ranks goes on from checkpoints of every other.

Arguments: a directory with a checkpoint of one rank (`start`) and room for results. Each layout trains from `start`,
saves under its name, and goes on; then from the checkpoint of each layout before it. The leader writes losses.json.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import cases
import torch.distributed as dist
from layouts import OPTIMIZER, UPDATES, lay_out

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.packing import pack_trees
from arpo_megatron.config import ParallelConfig

SHAPE = replace(cases.QWEN3, layers=4, tied=True)
LAYOUTS = {
    "tensor-pipeline": ParallelConfig(tensor=2, pipeline=2),
    "virtual-data-distributed": ParallelConfig(pipeline=2, virtual_pipeline=2, data=2, distributed_optimizer=True),
    "tensor-data-distributed": ParallelConfig(tensor=2, sequence=True, data=2, distributed_optimizer=True),
    "data": ParallelConfig(data=4),
}


def new_actor(layout: ParallelConfig, dtype: str = "float32") -> Actor:
    return Actor(cases.job(layout, dtype), SHAPE, None, optimizer=OPTIMIZER, total_updates=UPDATES)


def train(actor: Actor, updates: range) -> list[dict[str, float]]:
    """The statistics of the updates."""
    layout = actor.config.parallel
    rows = []
    for seed in updates:
        forest, credits = cases.minibatch(seed, count=5)
        packs = pack_trees(forest, credits, token_budget=120, ranks=layout.data, inherit=layout.nested_packs)
        rows.append(asdict(actor.update(packs, None)))
    return rows


def save(actor: Actor, directory: Path) -> None:
    if parallel.is_leader():
        directory.mkdir()
    parallel.broadcast_object(None)  # after the directory is there
    actor.save(directory)


def main() -> None:
    root, results = Path(sys.argv[1]), {}
    for name, layout in LAYOUTS.items():
        lay_out(layout)
        actor = new_actor(layout)
        actor.load(root / "start")
        rows = train(actor, range(3))
        save(actor, root / name)
        results[name] = {"rows": rows, "next": train(actor, range(3, 5))}
        for other in list(results):
            actor = new_actor(layout)
            actor.load(root / other)
            results[name][f"from {other}"] = train(actor, range(3, 5))
    if dist.get_rank() == 0:
        (root / "losses.json").write_text(json.dumps(results))
    parallel.destroy()


if __name__ == "__main__":
    main()
