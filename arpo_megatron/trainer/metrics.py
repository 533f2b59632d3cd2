"""The metrics of a step; docs/reference/run-directory.md lists them by name."""

import math
from collections import Counter
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
from arpo_megatron.packing.packs import report_packs, split_by_tree
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.accounting import RolloutStats, tokens_per_second
from arpo_megatron.trainer.batch import Batch
from arpo_megatron.trainer.collector import DROPS, StepInProgress, staleness
from arpo_megatron.trainer.scorer import mean_terms
from arpo_megatron.tree import Role, RolloutTree

Logprobs = NDArray[np.float32]


def rollout_metrics(trained: Sequence[ScoredTree], step: StepInProgress, config: JobConfig) -> dict[str, float]:
    """Return reward, staleness and cost metrics of a step's trees.

    Trees that hold replayed trajectories only are left out.
    """
    sampled = [item for item in trained if item.sampled]
    counters, success_threshold = rollout_counters(step, config), config.reward.success_threshold
    longest_s = max((stats.counts.longest_request_s for stats in step.stats), default=0.0)
    return {
        **reward_metrics(sampled, success_threshold),
        "groups_without_signal": sum(bool(np.ptp(item.rewards) == 0) for item in sampled),
        "groups_solved": groups_solved([*sampled, *step.left_out], success_threshold),
        **age_metrics([item.tree for item in sampled], step.step),
        "fork_chance": fork_chance([item.tree for item in sampled]),
        "cached_prompt_share": counters["cached_tokens"] / max(1, counters["prompt_tokens"]),
        "prefill_over_unique": counters["prefilled_tokens"] / max(1, counters["unique_tokens"]),
        "prefill_over_given": counters["prefilled_tokens"] / max(1, counters["given_tokens"]),
        "predicted_cached_share": counters["predicted_cached_tokens"] / max(1, counters["predicted_prompt_tokens"]),
        "tool_cache_hits": counters["tool_calls_cached"] / max(1, counters["tool_calls_executed"]),
        "tokens_per_s": tokens_per_second(step.stats),
        **(_admission_maxima(step) if config.rollout.admission == "kv" else {}),
        "longest_request_s": longest_s,
        "deadline_headroom_s": config.engine.request_timeout_s - longest_s,
        **counters,
        **{f"reward/{name}": mean for name, mean in mean_terms([item.terms for item in sampled]).items()},
    }


def groups_solved(scored: Sequence[ScoredTree], success_threshold: float) -> int:
    """Return the number of trees, trained or without signal, whose trajectories are all right."""
    counted = [item for item in scored if item.dropped in (None, "no_signal")]
    return sum(bool((item.accuracies > success_threshold).all()) for item in counted)


def rollout_counters(step: StepInProgress, config: JobConfig) -> dict[str, float]:
    """Return the counters of a step that add up over steps; those of admission only if there is one."""
    total: Counter[str] = Counter()
    for stats in step.stats:
        total.update(_collection_counters(stats))
        if config.rollout.admission == "kv":
            total.update(_admission_counters(stats))
    return {**total, **{f"dropped/{reason}": step.dropped[reason] for reason in DROPS}}


def _collection_counters(stats: RolloutStats) -> dict[str, float]:
    return {
        "forks": stats.totals.forks,
        "trees": stats.trees,
        "trajectories": stats.totals.trajectories,
        "trajectories_lost": stats.totals.lost,
        "tool_calls_executed": stats.counts.calls_executed,
        "tool_calls_cached": stats.counts.calls_cached,
        "tool_seconds_saved": stats.counts.seconds_saved,
        "tool_calls_invalid": stats.counts.calls_invalid,
        "tool_calls_at_limit": stats.counts.calls_at_limit,
        "tool_calls_repeated": stats.counts.calls_repeated,
        "tool_calls_failed": stats.counts.calls_failed,
        "tool_calls_inherited": stats.totals.calls_inherited,
        "requests_repeated": stats.counts.retries,
        "tokens_sampled": stats.counts.tokens_sampled,
        "prompt_tokens": stats.counts.prompt_tokens,
        "cached_tokens": stats.counts.cached_tokens,
        "prefilled_tokens": stats.counts.prefilled_tokens,
        "predicted_prompt_tokens": stats.totals.predicted_prompt_tokens,
        "predicted_cached_tokens": stats.totals.predicted_cached_tokens,
        "unique_tokens": stats.totals.unique_tokens,
        "flat_tokens": stats.totals.flat_tokens,
        "given_tokens": stats.totals.given_tokens,
    }


def _admission_maxima(step: StepInProgress) -> dict[str, float]:
    return {
        "trees_running_max": max((stats.trees_running for stats in step.stats), default=0),
        "trees_waiting_max": max((stats.trees_waiting for stats in step.stats), default=0),
    }


def _admission_counters(stats: RolloutStats) -> dict[str, float]:
    """Return what only admission counts: without it these counts are 0, also if the engines evict the most."""
    return {
        "tokens_recomputed": stats.counts.tokens_recomputed,
        "paths_evicted": stats.counts.evicted,
        "paths_suspended": stats.counts.suspended,
        "admission_s": stats.counts.admission_s,
    }


def reward_metrics(scored: Sequence[ScoredTree], success_threshold: float) -> dict[str, float]:
    """Return the mean reward and the shares of successes and kept formats; NaN if there is no sampled trajectory.

    Replayed trajectories are left out: they measure an older policy.
    """
    own = [(item, slice(len(item.rewards) - item.replayed)) for item in scored]  # replayed ones come last
    rewards = np.concatenate([item.rewards[first] for item, first in own])
    if not len(rewards):
        return dict.fromkeys(("reward", "success", "format_ok"), math.nan)
    return {
        "reward": float(rewards.mean()),
        "success": float((np.concatenate([item.accuracies[first] for item, first in own]) > success_threshold).mean()),
        "format_ok": float(np.concatenate([item.format_ok[first] for item, first in own]).mean()),
    }


def age_metrics(trees: Sequence[RolloutTree], version: int) -> dict[str, float]:
    """Return the age of the weights that sampled the trees of step `version` (from 0); see `staleness`."""
    ages = [staleness(tree, version) for tree in trees]
    sampled = [max(1, sum(len(s) for s in tree.segments if s.role is Role.MODEL)) for tree in trees]
    return {
        "staleness": float(np.average([mean for mean, _ in ages], weights=sampled)),
        "staleness_max": max(most for _, most in ages),
        "stale_trees": sum(most > 0 for _, most in ages),
    }


def fork_chance(trees: Sequence[RolloutTree]) -> float:
    """Return the mean probability of a fork over all measured fork points; NaN without any."""
    chances = [segment.branch.probability for tree in trees for segment in tree.segments if segment.branch is not None]
    return float(np.mean(chances)) if chances else math.nan


def sampling_gap(
    batches: Sequence[Batch],
    logprobs: Sequence[Sequence[Logprobs]],
    *,
    version: int,
    old_kv: bool | None = None,
) -> float | None:
    """Return the largest |trainer - engine| log-prob in nats over the tokens that policy `version` sampled.

    Args:
        batches: the step's trees, on rank 0.
        logprobs: float32 for each pack of each batch: the trainer's log-probs in nats.
        version: the policy version.
        old_kv: only trees that began with an older version (True), whose keys and values the engine may have kept, or
            only those that began with this one (False); None: all.

    Returns:
        inf if a log-prob is not finite; None if there is no such token: older policies sampled all of them, or this
        rank has no trees.
    """
    largest: float | None = None
    for batch, outputs in zip(batches, logprobs, strict=True):
        if not batch.trees:
            continue
        for tree, ours in zip(batch.trees, split_by_tree(batch.packs, outputs, batch.trees), strict=True):
            if old_kv is not None and (tree.step < version) != old_kv:
                continue
            ends = np.cumsum([len(segment) for segment in tree.segments])
            for segment, end in zip(tree.segments, ends, strict=True):
                if segment.logprobs is None or segment.policy_version != version or not len(segment):
                    continue
                gaps = np.abs(ours[end - len(segment) : end] - segment.logprobs)
                largest = max(largest or 0.0, float(gaps.max()) if np.isfinite(gaps).all() else np.inf)
    return largest


def pack_metrics(batches: Sequence[Batch], spec: ModelSpec, config: JobConfig) -> dict[str, float]:
    """Return the figures of a step's packs: maxima of `live_tokens` and `imbalance`, sums of the others."""
    if not batches:
        return {}
    cost = CostModel.of(spec)
    layout = config.parallel
    rows = [
        report_packs(
            batch.packs,
            batch.trees,
            ranks=layout.data,
            in_flight=layout.pipeline,
            lockstep=layout.expert > 1,
            cost=cost,
        ).row()
        for batch in batches
    ]
    largest = ("pack/live_tokens", "pack/imbalance")
    shard = ContextShard(0, layout.context, config.pack_multiple, cost)
    padding = sum(padding_of(pack, shard) for batch in batches for pack in batch.packs)
    figures = {name: (max if name in largest else sum)(row[name] for row in rows) for name in rows[0]}
    return {**figures, "pack/padding": padding}


def update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Return the figures of a step's updates: the maximum of `ratio_max`, the number of skipped ones, other means.

    Figures of parts that the model does not have (experts) are left out. Skipped updates count only if all were.
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
    """Add a step's mean entropy to "entropy" and 1 to "entropy_steps", unless all of its updates were skipped."""
    if entropies := [update.entropy_mean for update in updates if not update.skipped]:
        totals["entropy"] = totals.get("entropy", 0.0) + sum(entropies) / len(entropies)
        totals["entropy_steps"] = totals.get("entropy_steps", 0) + 1


def speed_metrics(
    batches: Sequence[Batch], spec: ModelSpec, config: JobConfig, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return the speed of the update phase; FLOPs are per second and rank.

    `trainer/tflops` counts model FLOPs (packing/flops.py), `trainer/hardware_tflops` all that are computed.
    """
    elapsed = seconds.get("update", 0.0)
    if not elapsed:
        return {}
    packs = [pack for batch in batches for pack in batch.packs]
    work, ranks = update_flops(spec, packs), config.parallel.world_size
    tflops = work.model_update / elapsed / ranks / 1e12
    peak = config.monitor.peak_tflops
    return {
        "trainer/tokens_per_s": sum(len(pack) for pack in packs) / elapsed,
        "trainer/flat_tokens_per_s": sum(tree.flat_tokens for batch in batches for tree in batch.trees) / elapsed,
        "trainer/tflops": tflops,
        "trainer/hardware_tflops": work.hardware_update(config.parallel, spec.layers) / elapsed / ranks / 1e12,
        **({} if peak is None else {"trainer/mfu": tflops / peak}),
    }
