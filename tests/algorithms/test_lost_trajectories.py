"""Advantages and losses of a tree that a failed tool call has cost a trajectory."""

import numpy as np
import pytest

from arpo_megatron.algorithms.advantages.aepo import EntropyAware
from arpo_megatron.algorithms.advantages.flow import TurnMean
from arpo_megatron.algorithms.advantages.group import GroupNormalised, group_advantages
from arpo_megatron.algorithms.advantages.xrpo import NoveltySharpened
from arpo_megatron.algorithms.base import AdvantageEstimator, Group, LossBatch
from arpo_megatron.algorithms.losses.gspo import Gspo
from arpo_megatron.rollout.lost_branches import without_lost_branches
from arpo_megatron.tree import FAILED_CALL, Role, RolloutTree, ToolRecord


def lost_one() -> RolloutTree:
    """One trajectory with a call, two without, and one that was lost; half of the calls are answered."""
    grown = RolloutTree("t", [1])
    for status, result in (("ok", [3]), (FAILED_CALL, [])):
        asks = grown.add(0, Role.MODEL, [2])
        told = grown.add(asks, Role.TOOL, result, tool=ToolRecord("python", {}, status, 1.0, False))
        if result:
            grown.add(told, Role.MODEL, [4])
    for _ in range(2):
        grown.add(0, Role.MODEL, [5, 6])
    tree = without_lost_branches(grown, 1, {"python": "HTTP 503"})
    tree.answered_shares = {"python": 0.5}
    return tree


@pytest.mark.parametrize("estimator", [EntropyAware(), TurnMean(), NoveltySharpened()])
def test_advantages_made_from_those_of_the_group_correct_for_lost_trajectories(estimator: AdvantageEstimator) -> None:
    """All turns of a trajectory are equally long here and no log-prob is known, so all equal those of the group."""
    tree = lost_one()
    group = Group(tree, np.array([1.0, 0.0, 0.5]), np.ones(3))
    (expected,), (found,) = GroupNormalised()([group]), estimator([group])
    assert abs(expected - group_advantages(group.rewards)).max() > 0.1, "the correction matters"
    ends = found if found.ndim == 1 else found[range(3), tree.leaves()]
    np.testing.assert_allclose(ends, expected, rtol=1e-12)


def test_gspo_divides_by_the_planned_trajectories() -> None:
    tree, rng = lost_one(), np.random.default_rng(1)
    tokens = tree.unique_tokens
    new, old, ones = rng.normal(-1, 0.1, tokens), np.full(tokens, -1.0), np.ones(3)
    batch = LossBatch([tree], [np.array([1.0, -1.0, 0.5])], [ones], [ones], [old], [new], [old], [np.zeros(tokens)])
    found = Gspo(0.5, 0.5).value(batch)
    assert (len(tree.leaves()), tree.planned) == (3, 4)
    tree.lost = None
    whole = Gspo(0.5, 0.5).value(batch)
    assert found.loss == pytest.approx(whole.loss * 3 / 4)
    for name in ("positive", "negative", "weight"):
        one, other = getattr(found.credits[0], name), getattr(whole.credits[0], name)
        np.testing.assert_allclose(one, other * 3 / 4, rtol=1e-6)
