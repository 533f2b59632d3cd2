"""Credit on the tree equals sums over all flattened trajectories."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.algorithms.credit import Aggregation, SharedAdvantage, TreeCredit, supervised_credit, tree_credits
from arpo_megatron.tree import Role, RolloutTree


@st.composite
def trees_with_advantages(draw: st.DrawFn) -> tuple[list[RolloutTree], list[list[float]]]:
    trees = []
    for number in range(draw(st.integers(1, 3))):
        tree = RolloutTree(f"task-{number}", np.arange(draw(st.integers(0, 4)), dtype=np.int32))
        for index in range(draw(st.integers(0, 9))):
            role = draw(st.sampled_from([Role.MODEL, Role.MODEL, Role.TOOL]))
            tree.add(draw(st.integers(0, index)), role, range(draw(st.integers(0, 5))))
        trees.append(tree)
    advantage = st.one_of(st.just(0.0), st.floats(-3, 3))
    return trees, [[draw(advantage) for _ in tree.leaves()] for tree in trees]


def flattened(
    trees: list[RolloutTree], advantages: list[list[float]], aggregation: Aggregation, attribution: SharedAdvantage
) -> list[TreeCredit]:
    """Return the same numbers token by token over all root-to-leaf trajectories, without sharing."""
    trajectories = [[tree.trajectory(leaf) for leaf in tree.leaves()] for tree in trees]
    all_masks = [trajectory.loss_mask.sum() for group in trajectories for trajectory in group]
    result = []
    for tree, group, group_advantages in zip(trees, trajectories, advantages, strict=True):
        starts = np.cumsum([0, *(len(segment) for segment in tree.segments)])
        by_token: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for trajectory, advantage in zip(group, group_advantages, strict=True):
            own = int(trajectory.loss_mask.sum())
            weight = 1 / max(sum(all_masks), 1) if aggregation == "token-mean" else 1 / (len(all_masks) * max(own, 1))
            offsets: defaultdict[int, int] = defaultdict(int)
            for segment, masked in zip(trajectory.segment_of_token, trajectory.loss_mask, strict=True):
                place = int(starts[segment]) + offsets[int(segment)]
                offsets[int(segment)] += 1
                if masked:
                    by_token[place].append((weight, advantage))
        columns = np.zeros((3, tree.unique_tokens))
        for place, pairs in by_token.items():
            mean = sum(advantage for _, advantage in pairs) / len(pairs)
            for weight, own_advantage in pairs:
                advantage = own_advantage if attribution == "soft" else mean
                columns[:, place] += weight * max(advantage, 0), weight * min(advantage, 0), weight
        result.append(TreeCredit(*columns.astype(np.float32)))
    return result


@pytest.mark.parametrize("attribution", ["soft", "hard"])
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
@given(case=trees_with_advantages())
def test_tree_credits_equal_brute_force_over_flattened_trajectories(
    aggregation: Aggregation, attribution: SharedAdvantage, case: tuple[list[RolloutTree], list[list[float]]]
) -> None:
    trees, advantages = case
    found = tree_credits(trees, advantages, aggregation=aggregation, shared_advantage=attribution)
    for one, expected in zip(found, flattened(trees, advantages, aggregation, attribution), strict=True):
        for name in ("positive", "negative", "weight"):
            values = getattr(one, name)
            assert values.dtype == np.float32
            np.testing.assert_allclose(values, getattr(expected, name), rtol=1e-5, atol=1e-7)


@given(trees_with_advantages())
def test_supervised_credit_sums_to_one_and_is_never_negative(case: tuple[list[RolloutTree], list[list[float]]]) -> None:
    trees, _ = case
    found = supervised_credit(trees)
    flat_model_tokens = sum(int(tree.trajectory(leaf).loss_mask.sum()) for tree in trees for leaf in tree.leaves())
    assert sum(float(one.weight.sum()) for one in found) == pytest.approx(1.0 if flat_model_tokens else 0.0)
    for one in found:
        np.testing.assert_array_equal(one.positive, one.weight)
        assert not one.negative.any()


def test_hard_shared_advantage_gives_the_prefix_the_mean() -> None:
    tree = RolloutTree("task", np.arange(2, dtype=np.int32))
    shared = tree.add(0, Role.MODEL, [1, 2])
    tool = tree.add(shared, Role.TOOL, [3])
    tree.add(tool, Role.MODEL, [4])
    tree.add(tool, Role.MODEL, [5])
    (hard,) = tree_credits([tree], [[3.0, -1.0]], aggregation="token-mean", shared_advantage="hard")
    (soft,) = tree_credits([tree], [[3.0, -1.0]], aggregation="token-mean", shared_advantage="soft")
    sixth = 1 / 6  # six flattened model tokens
    np.testing.assert_allclose(hard.positive, np.array([0, 0, 2, 2, 0, 3, 0]) * sixth, rtol=1e-6)
    np.testing.assert_allclose(hard.negative, np.array([0, 0, 0, 0, 0, 0, -1]) * sixth, rtol=1e-6)
    np.testing.assert_allclose(soft.positive, np.array([0, 0, 3, 3, 0, 3, 0]) * sixth, rtol=1e-6)
    np.testing.assert_allclose(soft.negative, np.array([0, 0, -1, -1, 0, 0, -1]) * sixth, rtol=1e-6)


def test_tree_credits_refuse_advantages_that_do_not_fit_the_leaves() -> None:
    tree = RolloutTree("task", np.arange(2, dtype=np.int32))
    tree.add(0, Role.MODEL, [1])
    with pytest.raises(ValueError, match="leaves"):
        tree_credits([tree], [[1.0, 2.0]], aggregation="token-mean", shared_advantage="soft")
    with pytest.raises(ValueError, match="leaves"):
        tree_credits([tree], [], aggregation="token-mean", shared_advantage="soft")
