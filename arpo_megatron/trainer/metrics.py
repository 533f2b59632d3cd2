"""The figures of a step that come from the trainer: packs, updates, work and speed, the gap to the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.actor.microbatch import ContextShard, padding_of
from arpo_megatron.actor.update_stats import UpdateStats
from arpo_megatron.config import JobConfig
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.balance import CostModel
from arpo_megatron.packing.flops import update_flops
from arpo_megatron.packing.packs import report, split_by_tree
from arpo_megatron.trainer.batch import Batch

Logprobs = NDArray[np.float32]


def sampling_gap(minibatches: Sequence[Batch], logprobs: Sequence[Sequence[Logprobs]], *, version: int) -> float | None:
    """Largest |trainer - engine| log-prob in nats over the tokens that the trainer's own `version` has sampled.

    inf where one is not finite; None where there is no such token: older versions sampled all of them, or there are no
    trees (on all ranks but the controller).
    """
    largest: float | None = None
    for minibatch, outputs in zip(minibatches, logprobs, strict=True):
        if not minibatch.trees:
            continue
        for tree, ours in zip(minibatch.trees, split_by_tree(minibatch.packs, outputs, minibatch.trees), strict=True):
            ends = np.cumsum([len(segment) for segment in tree.segments])
            for segment, end in zip(tree.segments, ends, strict=True):
                if segment.logprobs is None or segment.policy_version != version or not len(segment):
                    continue
                gaps = np.abs(ours[end - len(segment) : end] - segment.logprobs)
                # A comparison with NaN is false: not finite means as far apart as can be.
                largest = max(largest or 0.0, float(gaps.max()) if np.isfinite(gaps).all() else np.inf)
    return largest


def pack_metrics(minibatches: Sequence[Batch], spec: ModelSpec, config: JobConfig) -> dict[str, float]:
    """What packing made of a step's trees: sums over its minibatches, but the largest of `held` and `imbalance`.

    And what ranks add to the packs, `pack/padding`.
    """
    cost = CostModel.of(spec)
    layout = config.parallel
    rows = [
        report(
            minibatch.packs,
            minibatch.trees,
            ranks=layout.data,
            in_flight=layout.pipeline,
            in_step=layout.expert > 1,
            cost=cost,
        ).row()
        for minibatch in minibatches
    ]
    largest = ("pack/live_tokens", "pack/imbalance")
    place = ContextShard(0, layout.context, config.pack_multiple, cost)
    padding = sum(padding_of(pack, place) for minibatch in minibatches for pack in minibatch.packs)
    found = {name: (max if name in largest else sum)(row[name] for row in rows) for name in (rows[0] if rows else ())}
    return {**found, "pack/padding": padding} if rows else {}


def update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Update figures of a step: means over its minibatches, but the largest ratio and the number of skipped updates.

    What the model does not have (experts) is left out, and so are updates that were skipped where others were not.
    """
    if not updates:
        return {}
    taken = [update for update in updates if not update.skipped] or updates
    rows = [asdict(update) for update in taken]
    mean = [key for key, value in rows[0].items() if key not in ("ratio_max", "skipped") and value is not None]
    return {
        **{key: float(np.mean([row[key] for row in rows])) for key in mean},
        "ratio_max": max(update.ratio_max for update in taken),
        "updates_skipped": sum(update.skipped for update in updates),
    }


def count_entropy(totals: dict[str, float], updates: Sequence[UpdateStats]) -> None:
    """Add a step's mean entropy to "entropy", and 1 to "entropy_steps", unless all of its updates were skipped."""
    if found := [update.entropy_mean for update in updates if not update.skipped]:
        totals["entropy"] = totals.get("entropy", 0.0) + sum(found) / len(found)
        totals["entropy_steps"] = totals.get("entropy_steps", 0) + 1


def speed_metrics(
    minibatches: Sequence[Batch], spec: ModelSpec, config: JobConfig, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Speed of the update phase, per second and rank where it is FLOPs.

    `trainer/tokens_per_s` counts computed tokens, `trainer/flat_tokens_per_s` those of the flattened trajectories.
    `trainer/tflops` are model FLOPs (see packing/flops.py), `trainer/hardware_tflops` all that are computed, and
    `trainer/mfu` the first over `monitor.peak_tflops`.
    """
    elapsed = seconds.get("update", 0.0)
    if not elapsed:
        return {}
    packs = [pack for minibatch in minibatches for pack in minibatch.packs]
    work, ranks = update_flops(spec, packs), config.parallel.world_size
    tflops = work.model_update / elapsed / ranks / 1e12
    peak = config.monitor.peak_tflops
    return {
        "trainer/tokens_per_s": sum(len(pack) for pack in packs) / elapsed,
        "trainer/flat_tokens_per_s": sum(tree.flat_tokens for m in minibatches for tree in m.trees) / elapsed,
        "trainer/tflops": tflops,
        "trainer/hardware_tflops": work.hardware_update(config.parallel.recompute) / elapsed / ranks / 1e12,
        **({} if peak is None else {"trainer/mfu": tflops / peak}),
    }
