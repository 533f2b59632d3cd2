"""Estimators by turn, and those that use more than rewards, against the formulas of their papers, copy by copy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.algorithms.advantages.centred import Centred
from arpo_megatron.algorithms.advantages.chunks import ChunkReturn
from arpo_megatron.algorithms.advantages.group import group_advantages
from arpo_megatron.algorithms.advantages.hgpo import HierarchyOfGroups
from arpo_megatron.algorithms.advantages.rapo import RewardAware
from arpo_megatron.algorithms.advantages.token_group import TokenGroup
from arpo_megatron.algorithms.advantages.xrpo import NoveltySharpened
from arpo_megatron.algorithms.base import Group
from arpo_megatron.tree import Role, RolloutTree
from tests.algorithms import flat

seeds = st.integers(0, 10**6)
KINDS = st.sampled_from(["binary", "equal", "real"])


def flat_turns(tree: RolloutTree, leaf: int) -> list[tuple[tuple[int, ...], list[int]]]:
    """Return, token by token, the text since the previous turn and the positions of the turn's tokens."""
    starts = np.cumsum([0, *(len(segment) for segment in tree.segments)])
    found: list[tuple[tuple[int, ...], list[int]]] = []
    seen: list[int] = []
    speaking = False
    for index in tree.path(leaf):
        segment = tree.segments[index]
        for token, place in zip(segment.token_ids.tolist(), range(starts[index], starts[index + 1]), strict=True):
            if segment.role is not Role.MODEL:
                seen.append(token)
            elif speaking:
                found[-1][1].append(place)
            else:
                found.append((tuple(seen), [place]))
                seen = []
            speaking = segment.role is Role.MODEL
        speaking = speaking and segment.role is Role.MODEL  # an empty answer of a tool ends a turn as well
    return found


def by_token(tree: RolloutTree, advantages: np.ndarray, row: int) -> np.ndarray:
    return advantages[row][flat.segments_of(tree)]


@given(forest=flat.forests(), kind=KINDS, seed=seeds)
def test_chunk_return_is_discounted_by_later_chunks(forest, kind, seed):
    groups = flat.groups_of(forest, kind, np.random.default_rng(seed))
    for group, found in zip(groups, ChunkReturn(0.9)(groups), strict=True):
        for row, leaf in enumerate(group.tree.leaves()):
            chunks = flat_turns(group.tree, leaf)
            for number, (_, places) in enumerate(chunks):
                expected = 0.9 ** (len(chunks) - 1 - number) * group.rewards[row]
                np.testing.assert_allclose(by_token(group.tree, found, row)[places], expected, rtol=1e-12)


def flat_hgpo(group: Group, history: int, alpha: float, gamma: float) -> dict[tuple[int, int], float]:
    """Compare every turn of every copy with all others, by (trajectory, turn)."""
    paths = [flat_turns(group.tree, leaf) for leaf in group.tree.leaves()]
    steps = [(i, t) for i, path in enumerate(paths) for t in range(len(path))]
    returns = {(i, t): group.rewards[i] * gamma ** (len(paths[i]) - 1 - t) for i, t in steps}
    found = {}
    for i, t in steps:
        total = weights = 0.0
        for k in range(min(history, t) + 1):
            mine = [state for state, _ in paths[i][t - k : t + 1]]
            same = [
                returns[j, u] for j, u in steps if u >= k and [state for state, _ in paths[j][u - k : u + 1]] == mine
            ]
            if len(same) < 2 or max(same) == min(same):
                continue
            total += (k + 1) ** alpha * (returns[i, t] - np.mean(same)) / (np.std(same) + 1e-6)
            weights += (k + 1) ** alpha
        found[i, t] = total / weights if weights else 0.0
    return found


@given(forest=flat.forests(), kind=KINDS, seed=seeds, history=st.integers(0, 3), alpha=st.sampled_from([0.0, 1.0, 2.0]))
def test_hgpo_compares_a_turn_with_all_that_share_its_last_states(forest, kind, seed, history, alpha):
    groups = flat.groups_of(forest, kind, np.random.default_rng(seed))
    for group, found in zip(groups, HierarchyOfGroups(history, alpha, 0.9)(groups), strict=True):
        expected = flat_hgpo(group, history, alpha, 0.9)
        for row, leaf in enumerate(group.tree.leaves()):
            for number, (_, places) in enumerate(flat_turns(group.tree, leaf)):
                np.testing.assert_allclose(
                    by_token(group.tree, found, row)[places], expected[row, number], rtol=1e-9, atol=1e-12
                )


def test_hgpo_prefers_siblings_of_a_fork_to_strangers_with_the_same_answer() -> None:
    """Two branches after one fork and an unrelated turn with the same tool result: the sibling counts twice."""
    tree = RolloutTree("t", [1])
    call = tree.add(0, Role.MODEL, [2])
    result = tree.add(call, Role.TOOL, [9])
    for token in (3, 4):
        tree.add(result, Role.MODEL, [token])
    before = tree.add(0, Role.MODEL, [5])
    before = tree.add(tree.add(before, Role.TOOL, [8]), Role.MODEL, [6])
    tree.add(tree.add(before, Role.TOOL, [9]), Role.MODEL, [7])
    group = Group(tree, np.array([1.0, 0.0, 0.0]), np.zeros(3))
    (found,) = HierarchyOfGroups(1, 1.0, 1.0)([group])
    everyone = (1 - 1 / 3) / (np.std([1, 0, 0]) + 1e-6)
    siblings = (1 - 0.5) / (np.std([1, 0]) + 1e-6)
    assert found[0, 3] == pytest.approx((everyone + 2 * siblings) / 3)


@given(forest=flat.forests(), kind=KINDS, seed=seeds)
def test_rapo_scales_groups_with_spread_by_their_share(forest, kind, seed):
    groups = flat.groups_of(forest, kind, np.random.default_rng(seed))
    good = [len(set(group.rewards.tolist())) > 1 for group in groups]
    for group, logged, found in zip(groups, good, RewardAware()(groups), strict=True):
        rewards = group.rewards
        expected = np.zeros(len(rewards))
        if logged:
            expected = len(groups) / sum(good) * (rewards - rewards.mean()) / (np.std(rewards) + 1e-6)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        centred = Centred()([group])[0]
        np.testing.assert_allclose(centred, rewards - rewards.mean() if logged else 0.0, atol=1e-15)


@given(forest=flat.forests(), kind=KINDS, seed=seeds, limit=st.sampled_from([1.2, 5.0]))
def test_token_group_uses_mean_and_spread_over_tokens(forest, kind, seed, limit):
    groups = flat.groups_of(forest, kind, np.random.default_rng(seed))
    for group, found in zip(groups, TokenGroup(limit)(groups), strict=True):
        tree, rewards = group.tree, group.rewards
        tokens = np.array(
            [reward for leaf, reward in zip(tree.leaves(), rewards, strict=True) for _ in flat.places(tree, leaf)]
        )
        if len(set(tokens.tolist())) < 2:
            assert not found.any()
            continue
        expected = (tokens - tokens.mean()) / (tokens.std() + 1e-6)
        if (abs(expected) >= limit).any():
            np.testing.assert_allclose(found, group_advantages(rewards))
            continue
        own = [a for leaf, a in zip(tree.leaves(), found, strict=True) for _ in flat.places(tree, leaf)]
        np.testing.assert_allclose(own, expected, rtol=1e-9, atol=1e-9)
        assert sum(own) == pytest.approx(0.0, abs=1e-6)


@given(forest=flat.forests(), seed=seeds)
def test_xrpo_sharpens_better_and_less_likely_trajectories(forest, seed):
    rng = np.random.default_rng(seed)
    logged = []
    for tree in forest:
        copy = RolloutTree(tree.task_id, tree.prompt_ids)
        for segment in tree.segments[1:]:
            known = segment.role is Role.MODEL and rng.random() < 0.9
            values = rng.normal(-1, 1, len(segment)) if known else None
            copy.add(segment.parent, segment.role, segment.token_ids, logprobs=values)
        logged.append(copy)
    for group, found in zip(groups := flat.groups_of(logged, "real", rng), NoveltySharpened()(groups), strict=True):
        scores: list[float | None] = []
        for leaf in group.tree.leaves():
            path = [s for s in (group.tree.segments[i] for i in group.tree.path(leaf)) if s.role is Role.MODEL]
            values = [float(v) for s in path if s.logprobs is not None for v in s.logprobs]
            whole = len(values) == sum(len(s) for s in path) > 0
            scores.append(sum(values) / len(values) if whole else None)
        known = [score for score in scores if score is not None]
        for advantage, score, own in zip(group_advantages(group.rewards), scores, found, strict=True):
            gain = 0.0
            if advantage > 0 and score is not None:
                gain = min(max(2.5 * (1 - np.exp(score - np.mean(known))), 0.0), 0.5 * advantage)
            assert own == pytest.approx(advantage + gain, rel=1e-5, abs=1e-9)
