"""Every estimator against its formula, written out trajectory by trajectory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.algorithms.advantages.aepo import EntropyAware
from arpo_megatron.algorithms.advantages.flow import TurnMean
from arpo_megatron.algorithms.advantages.group import group_advantages
from arpo_megatron.algorithms.advantages.reinforce_plus_plus import ReinforcePlusPlus
from arpo_megatron.algorithms.advantages.rloo import LeaveOneOut
from arpo_megatron.algorithms.credit import tree_credits
from arpo_megatron.tree import Role
from tests.algorithms import flat

seeds = st.integers(0, 10**6)


@given(forest=flat.forests(), kind=flat.rewards_of_any_kind, seed=seeds)
def test_rloo_compares_with_the_mean_of_the_others(forest, kind, seed):
    groups = flat.groups_of(forest, kind, np.random.default_rng(seed))
    for group, found in zip(groups, LeaveOneOut()(groups), strict=True):
        rewards = group.rewards.tolist()
        for i, reward in enumerate(rewards):
            others = rewards[:i] + rewards[i + 1 :]
            expected = reward - sum(others) / len(others) if others else 0.0
            assert found[i] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("baseline", [False, True])
@given(forest=flat.forests(), kind=flat.rewards_of_any_kind, seed=seeds)
def test_reinforce_plus_plus_whitens_over_the_tokens_of_all_copies(baseline, forest, kind, seed):
    groups = flat.groups_of(forest, kind, np.random.default_rng(seed))
    returns = [group.rewards - group.rewards.mean() * baseline for group in groups]
    tokens = [
        value
        for group, own in zip(groups, returns, strict=True)
        for leaf, value in zip(group.tree.leaves(), own, strict=True)
        for _ in flat.places(group.tree, leaf)
    ]
    found = ReinforcePlusPlus(baseline)(groups)
    if len(tokens) < 2 or np.ptp(tokens) < 1e-12:
        assert all(not own.any() for own in found)
        return
    std = np.sqrt(np.var(tokens, ddof=1) + 1e-8)
    for own, expected in zip(found, returns, strict=True):
        np.testing.assert_allclose(own, (expected - np.mean(tokens)) / std, rtol=1e-9, atol=1e-9)


@given(case=flat.cases(by_segment=False))
def test_aepo_weighs_advantages_by_the_standardised_entropy_of_all_copies(case):
    batch = case.batch
    copies = [
        batch.entropies[number][place]
        for number, tree in enumerate(batch.trees)
        for leaf in tree.leaves()
        for place in flat.places(tree, leaf)
    ]
    found = EntropyAware(0.2).token_factors(batch)
    for factors, entropies in zip(found, batch.entropies, strict=True):
        known = ~np.isnan(entropies)
        if len(copies) < 2 or np.ptp(copies) == 0:
            np.testing.assert_allclose(factors[known], 1.0, rtol=1e-6)
        else:
            standardised = (entropies[known] - np.mean(copies)) / np.std(copies)
            np.testing.assert_allclose(factors[known], 1 + 0.2 * standardised, rtol=1e-6)


@given(forest=flat.forests(), seed=seeds)
def test_flow_grpo_gives_all_turns_equal_weight(forest, seed):
    """Token by token: 1 / (trajectories * turns of the trajectory * tokens of the turn)."""
    groups = flat.groups_of(forest, "real", np.random.default_rng(seed))
    count = sum(len(tree.leaves()) for tree in forest)
    credits = tree_credits(forest, TurnMean()(groups), aggregation="sequence-mean")
    for group, credit in zip(groups, credits, strict=True):
        tree, expected = group.tree, np.zeros(group.tree.unique_tokens)
        starts = np.cumsum([0, *(len(segment) for segment in tree.segments)])
        for leaf, own in zip(tree.leaves(), group_advantages(group.rewards), strict=True):
            turns: list[list[int]] = [[]]
            for index in tree.path(leaf):
                if tree.segments[index].role is not Role.MODEL:
                    turns.append([])
                else:
                    turns[-1] += range(starts[index], starts[index + 1])
            turns = [turn for turn in turns if turn]
            for turn in turns:
                expected[turn] += own / (count * len(turns) * len(turn))
        np.testing.assert_allclose(credit.positive + credit.negative, expected, rtol=1e-4, atol=1e-6)
