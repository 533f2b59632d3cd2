"""Credit for turns whose tool result changed what the policy did next."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.advantages.group import GroupNormalised, finite
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.credit import TreeShape
from arpo_megatron.algorithms.turns import Turn, turns
from arpo_megatron.algorithms.types import Floats
from arpo_megatron.tree import Role, RolloutTree


@dataclass(frozen=True, slots=True)
class InformationGain:
    """A_is = A_i + information_weight * gate * (g_is - mean(g)) / (std(g) + 1e-6) (InfoPO, arXiv 2603.00656).
    Experimental: the formula comes from the paper's abstract; the normalisation and the gate are ours.

    A_i is that of `GroupNormalised`. g is the gain of a turn: the mean over the tokens of the next MODEL segment of
    log p(token | context) - log p(token | context with an empty tool result). It measures how much the result moved
    the next action. The last turn of a trajectory has no gain, and keeps A_i. Mean and biased std of g are over all
    turns of all trajectories of the group. gate = information_scale / (information_scale + std(r)), with the unbiased
    std of the rewards: the gain counts fully in groups without spread, and less where the outcome itself separates
    trajectories. The counterfactual is a further branch of the tree, so its prefix is computed once; all of them cost
    one pass.
    """

    information_weight: Annotated[float, Field(ge=0)] = 0.2
    """Weight of the gain."""
    information_scale: Annotated[float, Field(gt=0)] = 0.1
    """Spread of rewards at which the gain counts half."""

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Return A_i, float64[leaves] per group: without log-probs there is no gain."""
        return GroupNormalised()(groups)

    def contexts(self, groups: Sequence[Group], masked: Sequence[int]) -> list[RolloutTree]:
        """Return the trees with a masked copy of every tool result, and of the next MODEL segments below it."""
        return [_with_masked_results(group.tree, masked) for group in groups]

    def credit(
        self, groups: Sequence[Group], contexts: Sequence[RolloutTree], logprobs: Sequence[Floats]
    ) -> list[Floats]:
        """Return float64[leaves, segments] per group."""
        found = []
        for group, outcome, context, logs in zip(groups, self(groups), contexts, logprobs, strict=True):
            shape = TreeShape(group.tree)
            advantages = np.where(shape.on_path, outcome[:, None], 0.0)
            gains = _gains(group.tree, context, logs)
            places = [
                (row, turn.segments, gains[following.segments[0]])
                for row, leaf in enumerate(group.tree.leaves())
                for turn, following in _pairs(group.tree, leaf)
                if following.segments[0] in gains
            ]
            values = np.array([gain for _, _, gain in places])
            rewards = finite(group.rewards)
            spread = float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0
            gate = self.information_weight * self.information_scale / (self.information_scale + spread)
            for (row, segments, _), gain in zip(places, values, strict=True):
                advantages[row, list(segments)] += gate * (gain - values.mean()) / (values.std() + 1e-6)
            found.append(advantages)
        return found


def _pairs(tree: RolloutTree, leaf: int) -> list[tuple[Turn, Turn]]:
    return list(pairwise(turns(tree, leaf)))


def _masked_turns(tree: RolloutTree) -> list[tuple[int, list[int]]]:
    """Return each tool result after a MODEL segment, with the MODEL segments below it that have tokens."""
    children, segments = tree.children(), tree.segments
    found = []
    for index, segment in enumerate(segments):
        if segment.role is Role.TOOL and segments[segment.parent].role is Role.MODEL:
            below = [own for own in children[index] if segments[own].role is Role.MODEL and len(segments[own])]
            if below:
                found.append((index, below))
    return found


def _with_masked_results(tree: RolloutTree, masked: Sequence[int]) -> RolloutTree:
    copy = RolloutTree(tree.task_id, tree.prompt_ids, step=tree.step)
    for segment in tree.segments[1:]:
        copy.append(segment.parent, segment)
    for result, below in _masked_turns(tree):
        empty = copy.add(tree.segments[result].parent, Role.TOOL, masked)
        for index in below:
            copy.add(empty, Role.MODEL, tree.segments[index].token_ids)
    return copy


def _gains(tree: RolloutTree, context: RolloutTree, logprobs: Floats) -> dict[int, float]:
    """Return the gain of each MODEL segment after a masked result."""
    shape = TreeShape(context)
    sums, found = shape.sum_of_segments(np.nan_to_num(logprobs)), {}
    place = len(tree.segments)
    for _, below in _masked_turns(tree):
        for offset, index in enumerate(below, start=1):
            found[index] = float(sums[index] - sums[place + offset]) / len(tree.segments[index])
        place += 1 + len(below)
    return found
