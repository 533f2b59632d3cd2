"""Time of a gradient in a pipeline of two stages: groups of whole trees against packs that repeat ancestors.

Both sides compute the same gradient of the same trees with the trainer's own code, and are timed in turn on one thread
per stage. Groups of whole trees compute no ancestor twice, but few of them make a large bubble: the second stage waits
for the first group to pass the first stage. Packs that repeat ancestors make a small bubble.

`repeating_over_whole` is the quotient of their times, below 1 if repeating is faster. `planned` is the same by the cost
model, with which the trainer chooses the size of the groups (`pack_batch`).
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.bench import memory
from arpo_megatron.bench.ranks import run_ranks
from arpo_megatron.jobs import resolve
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.packing.balance import CostModel
from arpo_megatron.packing.packs import pack_trees, pipeline_cost, rank_groups, report_packs
from arpo_megatron.plan.synthetic_trees import Mix, TurnMix
from arpo_megatron.tree import RolloutTree

STAGES = 2
SPEC = replace(
    KNOWN_MODELS["Qwen/Qwen3-8B"],
    layers=STAGES,
    hidden=128,
    heads=2,
    kv_heads=1,
    head_dim=64,
    ffn=512,
    vocabulary=512,  # the head makes the second stage a little slower, as in large models
    max_positions=16384,
)
SIDES = ("whole", "repeating")


def bench_pipeline(mix: Mix | TurnMix, trees: list[int], token_budgets: list[int], *, seconds: float) -> dict[str, Any]:
    """Measure gradients of batches of trees.

    Args:
        mix: family of the trees.
        trees: numbers of trees of a batch.
        token_budgets: tokens per pack, and limits of a group that repeats ancestors; a row for each with each batch.
        seconds: time for a row; each side is timed at least once, after a pass of both as a warm-up.

    Raises:
        UserError: a rank failed.
    """
    settings = {
        "trees": [mix.tree(seed, SPEC.vocabulary).to_dict() for seed in range(max(trees))],
        "rows": [(count, budget) for budget in token_budgets for count in trees],
        "seconds": seconds,
    }
    with TemporaryDirectory(prefix="arpo-bench-pipeline-") as made:
        root = Path(made)
        (root / "settings.json").write_text(json.dumps(settings))
        run_ranks("pipeline", root, STAGES)
        found: dict[str, Any] = json.loads((root / "figures.json").read_text())
    return {**found, "stages": STAGES, "shape": f"{SPEC.layers} x {SPEC.hidden}"}


def main() -> None:
    """Run one stage; rank 0 writes the figures as JSON."""
    root = Path(sys.argv[1])
    settings = json.loads((root / "settings.json").read_text())
    trees = [RolloutTree.from_dict(each) for each in settings["trees"]]
    config = resolve.resolve("quickstart", overrides=[f"parallel.pipeline={STAGES}", "model.dtype=float32"])
    parallel.initialize(config.parallel, config.seed)
    actor = Actor(config, SPEC, None, optimizer=None, total_updates=1)
    rows = [measure(actor, trees[:count], budget, settings["seconds"]) for count, budget in settings["rows"]]
    peak = sum(parallel.gather_objects(memory.highest()))
    if parallel.is_rank_zero():
        (root / "figures.json").write_text(json.dumps({"rows": rows, "peak_memory_gb": round(peak / 1e9, 2)}))
    parallel.destroy()


def measure(actor: Actor, trees: list[RolloutTree], token_budget: int, seconds: float) -> dict[str, Any]:
    """Time both sides in turn on all ranks."""
    cost = CostModel.of(SPEC)
    packs = {
        side: pack_trees(trees, supervised_credit(trees), token_budget=token_budget, group_tokens=limit, cost=cost)
        for side, limit in zip(SIDES, (None, token_budget), strict=True)
    }
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    gradients: dict[str, list[Tensor]] = {}
    for side in SIDES:
        actor.accumulate(packs[side], None)
        gradients[side] = [parameter.main_grad.clone() for parameter in actor.model.parameters()]
    started = time.perf_counter()
    while parallel.broadcast_object(not times["whole"] or time.perf_counter() - started < seconds):
        for side in SIDES:
            dist.barrier()
            begun = time.perf_counter()
            actor.accumulate(packs[side], None)
            dist.barrier()
            times[side].append(time.perf_counter() - begun)
    row: dict[str, Any] = {"trees": len(trees), "token_budget": token_budget, "passes": len(times["whole"])}
    for side in SIDES:
        made = report_packs(packs[side], trees)
        groups = rank_groups(packs[side], 0)
        row[side] = {
            "seconds": round(median(times[side]), 3),
            "repeated_share": round(made.repeated / made.computed, 4),
            "groups": len(groups),
            "largest_group": max(sum(len(packs[side][index]) for index in group) for group in groups),
        }
    planned = {side: pipeline_cost(packs[side], 1, STAGES, 1, cost) for side in SIDES}
    return {
        **row,
        "repeating_over_whole": round(row["repeating"]["seconds"] / row["whole"]["seconds"], 3),
        "planned": round(planned["repeating"] / planned["whole"], 3),
        "gradients_differ_by": max(parallel.gather_objects(_distance(*gradients.values()))),
    }


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the L2 distance of two gradients of this stage over their norm."""
    ours, theirs = (torch.cat([each.double().flatten() for each in side]) for side in (found, expected))
    return float((ours - theirs).norm() / theirs.norm())


if __name__ == "__main__":
    main()
