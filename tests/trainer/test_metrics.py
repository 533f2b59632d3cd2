"""Metrics of a step: the gap to the engines, ages of weights, experts, entropies; and the check of the first ratios."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from arpo_megatron.actor.update_stats import PolicyStats, UpdateStats
from arpo_megatron.algorithms.branching import GrpoPolicy
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import EngineConfig, JobConfig, RolloutConfig
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.accounting import RolloutCounts, TreeStats, rollout_stats
from arpo_megatron.tasks.base import Task
from arpo_megatron.trainer.batch import Batch
from arpo_megatron.trainer.collector import StepInProgress
from arpo_megatron.trainer.consistency import check_on_policy
from arpo_megatron.trainer.metrics import (
    Logprobs,
    age_metrics,
    count_entropy,
    fork_chance,
    rollout_metrics,
    sampling_gap,
    update_metrics,
)
from arpo_megatron.tree import BranchRecord, Role, RolloutTree

STATS = UpdateStats.of(
    PolicyStats.of(ratio=torch.ones(3), log_ratio=torch.zeros(3), entropies=torch.ones(3)).sums,
    torch.ones(()),
    grad_norm=1.0,
    lr=1e-3,
    skipped=False,
)


def sampled_batch(*versions: int) -> tuple[Batch, list[Logprobs]]:
    """A tree with a MODEL segment of two tokens for each version, sampled at -1 nat, and its log-probs."""
    tree = RolloutTree("task", [1, 2])
    for version in versions:
        tree.add(0, Role.MODEL, [3, 4], logprobs=[-1.0, -1.0], policy_version=version)
    tree.add(0, Role.MODEL, [5])  # without log-probs
    packs = pack_trees([tree], supervised_credit([tree]), token_budget=100)
    return Batch(packs, [tree]), [np.full(len(pack.predictors), -1.0, np.float32) for pack in packs]


def set_logprob(of: tuple[Batch, list[Logprobs]], token: int, logprob: float) -> None:
    """Set the trainer's log-prob of a token of the tree, counted over its segments."""
    batch, logprobs = of
    logprobs[0][batch.packs[0].token_index == token] = logprob


def test_pressure_on_the_engines_is_reported_over_all_collections_of_a_step() -> None:
    tree = sampled_batch(1)[0].trees[0]
    item = ScoredTree(Task("task", (), "", "math", ""), tree, np.zeros(2), np.zeros(2), np.zeros(2, bool))
    each = [TreeStats.of(tree, GrpoPolicy(2))]
    stats = [
        rollout_stats([tree], counts, each, failed=0, seconds=1.0, trees_running=running, trees_waiting=waiting)
        for counts, running, waiting in (
            (RolloutCounts(evicted=2, longest_request_s=40.0), 3, 5),
            (RolloutCounts(evicted=1, longest_request_s=10.0), 4, 0),
        )
    ]
    config = JobConfig("test", engine=EngineConfig(request_timeout_s=100.0))
    found = rollout_metrics([item], StepInProgress(1, stats=stats), config)
    assert (found["trees_running_max"], found["trees_waiting_max"], found["paths_evicted"]) == (4, 5, 3)
    assert (found["longest_request_s"], found["deadline_headroom_s"]) == (40.0, 60.0)


def test_metrics_of_admission_are_absent_without_it() -> None:
    """Zeros would read as an engine that evicts nothing."""
    counted = {"trees_running_max", "trees_waiting_max", "paths_evicted", "tokens_recomputed"}
    counted |= {"paths_suspended", "admission_s"}
    step = StepInProgress(1, stats=[rollout_stats([], RolloutCounts(), [], failed=0, seconds=1.0)])
    item = ScoredTree(
        Task("task", (), "", "math", ""), sampled_batch(1)[0].trees[0], np.zeros(2), np.zeros(2), np.zeros(2, bool)
    )
    for admission in ("kv", "all"):
        found = rollout_metrics([item], step, JobConfig("test", rollout=RolloutConfig(admission=admission)))
        assert counted & found.keys() == (counted if admission == "kv" else set())


def test_sampling_gap_covers_tokens_of_the_present_version() -> None:
    first, second = sampled_batch(3, 3), sampled_batch(3, 2)
    assert sampling_gap([first[0], second[0]], [first[1], second[1]], version=3) == 0.0
    set_logprob(second, 2, -1.5)
    set_logprob(second, 3, -0.75)
    assert sampling_gap([first[0], second[0]], [first[1], second[1]], version=3) == 0.5
    set_logprob(second, 4, -9.0)  # sampled by version 2
    assert sampling_gap([first[0], second[0]], [first[1], second[1]], version=3) == 0.5
    assert sampling_gap([first[0], second[0]], [first[1], second[1]], version=2) == 8.0


def test_sampling_gap_separates_trees_that_began_with_older_weights() -> None:
    """Their keys and values may be those of older weights (`rollout.across_push=keep_kv`)."""
    (batch, logprobs), version = sampled_batch(3, 3), 3
    set_logprob((batch, logprobs), 2, -1.5)
    batch.trees[0].step = version - 1
    assert sampling_gap([batch], [logprobs], version=version, old_kv=True) == 0.5
    assert sampling_gap([batch], [logprobs], version=version, old_kv=False) is None
    batch.trees[0].step = version
    assert sampling_gap([batch], [logprobs], version=version, old_kv=True) is None
    assert sampling_gap([batch], [logprobs], version=version, old_kv=False) == 0.5


def test_sampling_gap_is_none_without_tokens_to_compare() -> None:
    first = sampled_batch(3, 2)
    assert sampling_gap([first[0]], [first[1]], version=4) is None  # older versions sampled all
    assert sampling_gap([], [], version=3) is None
    assert sampling_gap([Batch(first[0].packs)], [first[1]], version=3) is None  # a rank without trees


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_sampling_gap_is_infinite_if_a_logprob_is_not_finite(bad: float) -> None:
    one = sampled_batch(3)
    set_logprob(one, 3, bad)
    assert sampling_gap([one[0]], [one[1]], version=3) == np.inf


def test_staleness_of_a_step_is_the_mean_over_its_sampled_tokens() -> None:
    def path(*lengths: int) -> ScoredTree:
        """One trajectory whose segments of these lengths were sampled by the versions 0, 1, ..."""
        tree, parent = RolloutTree("task", [1]), 0
        for version, length in enumerate(lengths):
            parent = tree.add(parent, Role.MODEL, [5] * length, policy_version=version)
        return ScoredTree(Task("task", (), "1", "math", "?"), tree, np.ones(1), np.ones(1), np.ones(1, bool))

    trees = [path(2, 6), path(0, 4), path(4, 4, 16)]
    found = age_metrics([item.tree for item in trees], 2)
    ages = [2] * 2 + [1] * 6 + [1] * 4 + [2] * 4 + [1] * 4 + [0] * 16
    assert found == {"staleness": pytest.approx(np.mean(ages)), "staleness_max": 2, "stale_trees": 3}


def check(exact: bool = True, **changes: Any) -> None:
    check_on_policy(dataclasses.replace(STATS, **changes), exact=exact)


def test_ratios_of_exactly_one_pass() -> None:
    check()
    check(exact=False, ratio_max=1.1, kl_old=1e-4)  # additions in another order


@pytest.mark.parametrize(
    "changes", [{"ratio_max": 1.0000001}, {"kl_old": 1e-12}, {"ratio_max": np.nan}, {"kl_old": np.nan}]
)
def test_any_other_ratio_before_an_update_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(RuntimeError, match="do not compute the same thing"):
        check(**changes)


@pytest.mark.parametrize("kl_old", [2e-3, np.nan])
def test_policy_far_from_itself_is_refused_on_gpus(kl_old: float) -> None:
    with pytest.raises(RuntimeError, match="do not compute the same thing"):
        check(exact=False, kl_old=kl_old)


def test_expert_metrics_are_means_and_absent_without_experts() -> None:
    assert not {"expert_busiest", "expert_loss"} & update_metrics([STATS, STATS]).keys()
    rows = [dataclasses.replace(STATS, expert_busiest=busiest, expert_loss=1.5) for busiest in (1.0, 2.0)]
    found = update_metrics(rows)
    assert (found["expert_busiest"], found["expert_loss"]) == (1.5, 1.5)


def test_mean_entropy_leaves_out_skipped_updates() -> None:
    totals: dict[str, float] = {}
    count_entropy(totals, [dataclasses.replace(STATS, entropy_mean=value) for value in (1.0, 2.0)])
    count_entropy(totals, [dataclasses.replace(STATS, entropy_mean=float("nan"), skipped=True)])
    count_entropy(totals, [dataclasses.replace(STATS, entropy_mean=0.5)])
    assert totals == {"entropy": 2.0, "entropy_steps": 2}


def test_fork_chance_is_the_mean_over_measured_fork_points() -> None:
    tree = RolloutTree("task", [1, 2])
    call = tree.add(0, Role.MODEL, [3])
    tool = tree.add(call, Role.TOOL, [4])
    for chance in (0.2, None, 0.6):
        record = None if chance is None else BranchRecord(dH=0.0, probability=chance, draw=0.5, why="draw")
        tree.add(tool, Role.MODEL, [5], branch=record)
    assert fork_chance([tree]) == pytest.approx(0.4)
    assert np.isnan(fork_chance([]))
