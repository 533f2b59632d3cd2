"""Layouts of four ranks resume from each other's checkpoints; the ranks of test_resharding.py run it."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.config import JobConfig, ModelConfig, OptimizerConfig, ParallelConfig
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.weights.export import export_hf
from tests.actor import cases
from tests.actor.cases import join

SPECS = {"dense": replace(cases.QWEN3, layers=4, tied=True), "experts": replace(cases.QWEN3_MOE, layers=4)}
LAYOUTS = {
    "dense": {
        "tensor-pipeline": ParallelConfig(tensor=2, pipeline=2),
        "virtual-data-distributed": ParallelConfig(pipeline=2, virtual_pipeline=2, data=2, distributed_optimizer=True),
        "tensor-data-distributed": ParallelConfig(tensor=2, sequence=True, data=2, distributed_optimizer=True),
        "data": ParallelConfig(data=4),
    },
    "experts": {
        "expert-distributed": ParallelConfig(data=4, expert=2, distributed_optimizer=True),
        "tensor-expert": ParallelConfig(tensor=2, sequence=True, data=2, expert=2),
    },
}
OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_fraction=0.2, weight_decay=0.1)
UPDATES = 10


def new_actor(kind: str, layout: ParallelConfig) -> Actor:
    # The path only marks the model as one that the job does not make; its shape and random weights are given here.
    job = JobConfig(name="test", model=ModelConfig(dtype="float32", path=Path("unread")), parallel=layout)
    return Actor(job, SPECS[kind], None, optimizer=OPTIMIZER, total_updates=UPDATES)


def draws_alike(layout: ParallelConfig) -> bool:
    """Whether the layout draws the random weights of one rank; stages and expert ranks draw their own."""
    return layout.pipeline == layout.expert == 1


def train(actor: Actor, updates: range) -> list[dict[str, float]]:
    """Return the statistics of the updates, and a sum of the log-probs before each."""
    layout = actor.config.parallel
    rows = []
    for seed in updates:
        # Five trees in packs of about two: an odd number, so that two data-parallel ranks have different counts.
        forest, credits = cases.batch(seed, count=5)
        packs = pack_trees(forest, credits, token_budget=120, ranks=layout.data, lockstep=layout.expert > 1)
        before = actor.logprobs(packs)
        stats = actor.update(packs, before if seed % 2 else [pack.sampling_logprobs for pack in packs])
        rows.append({**asdict(stats), "logprobs": float(sum(values.sum(dtype="float64") for values in before))})
    return rows


def skipped(actor: Actor) -> list[tuple[bool, list[int]]]:
    """Return what each rank reports about an update in which the loss of one pack is not finite."""
    layout = actor.config.parallel
    packs = pack_trees(*cases.batch(9, count=5), token_budget=60, ranks=layout.data, lockstep=layout.expert > 1)
    packs[-1] = replace(packs[-1], positive=packs[-1].positive * float("nan"))
    return parallel.gather_objects(
        (actor.update(packs, None, "nll").skipped, [i - len(packs) for i in actor.nonfinite_packs])
    )


def save(actor: Actor, directory: Path) -> None:
    alone = directory.with_suffix(".weights")
    if parallel.is_rank_zero():
        directory.mkdir()
        alone.mkdir()
    parallel.broadcast_object(None)  # after the directories are there
    cases.save(actor, directory)
    cases.save_weights(actor, alone)


def main(root: Path, layouts: dict[str, list[str]]) -> None:
    """Train each layout from the checkpoint of one rank (`root / kind`), save, and resume from all checkpoints so far.

    Rank 0 writes `losses.json`.
    """
    results: dict[str, dict[str, Any]] = {kind: {} for kind in layouts}
    for kind, name in [(kind, name) for kind, names in layouts.items() for name in names]:
        layout = LAYOUTS[kind][name]
        join(layout)
        fresh = train(new_actor(kind, layout), range(1)) if draws_alike(layout) else None
        actor = new_actor(kind, layout)
        actor.load(root / kind)
        rows = train(actor, range(2))
        save(actor, root / name)
        export_hf(actor.chunks, SPECS[kind], root / "hf", root / f"{name}.hf")
        results[kind][name] = {"fresh": fresh, "rows": rows, "next": train(actor, range(2, 3))}
        for other in list(results[kind]):
            actor = new_actor(kind, layout)
            actor.load(root / other)
            results[kind][name][f"from {other}"] = train(actor, range(2, 3))
        results[kind][name]["skipped"] = skipped(actor)
    if dist.get_rank() == 0:
        (root / "losses.json").write_text(json.dumps(results))
    parallel.destroy()
