"""Samples of the study: a tree with the derivatives of its log-probs, and its gradient along u."""

import json
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.algorithms.advantages.group import group_advantages
from arpo_megatron.algorithms.types import Floats
from arpo_megatron.tree import Role, RolloutTree

CREDITS = ("token-mean", "sequence-mean, soft", "sequence-mean, hard")
"""Weights of trajectories and credit of shared tokens. At the sampling policy `token-mean` has one gradient for hard
and soft credit: the coefficient of a shared token is the sum of the advantages below it in both."""


@dataclass(frozen=True, slots=True)
class TreeSample:
    """A tree without its tokens: what its gradient along u and its cost depend on. Lists are over its segments."""

    task: str
    parents: list[int]
    tokens: list[int]
    """MODEL tokens; 0 for other segments."""
    calls: list[int]
    """1 for the answer of a tool call, else 0."""
    derivatives: list[float]
    """Derivative of the segment's summed log-prob along u."""
    leaves: list[int]
    rewards: list[float]
    """Reward of each leaf."""
    chances: list[float]
    """Probability of a fork at each measured fork point."""

    @classmethod
    def of(cls, tree: RolloutTree, rewards: Floats, derivatives: Floats) -> Self:
        """Describe a tree with the rewards of its leaves and the derivatives of its segments."""
        segments = tree.segments
        return cls(
            tree.task_id,
            [segment.parent for segment in segments],
            [len(segment) if segment.role is Role.MODEL else 0 for segment in segments],
            [int(segment.role is Role.TOOL) for segment in segments],
            derivatives.tolist(),
            [int(leaf) for leaf in tree.leaves()],
            rewards.tolist(),
            [segment.branch.probability for segment in segments if segment.branch is not None],
        )

    def line(self) -> str:
        """Return the sample as a line of JSON."""
        return json.dumps(asdict(self))

    def gradients(self, credit: str, size: int | None = None) -> list[tuple[float, int]]:
        """Return (g.u, calls) of the tree, or of each disjoint group of `size` leaves.

        Only leaves without forks are independent, so a tree with forks has no smaller groups.
        """
        on_path, size, found = self._on_path(), size or len(self.leaves), list[tuple[float, int]]()
        for start in range(0, len(self.leaves) - size + 1, size):
            group, rewards = on_path[start : start + size], np.array(self.rewards[start : start + size])
            value = coefficients(group, rewards, np.array(self.tokens), credit) @ np.array(self.derivatives)
            found.append((float(value), int(np.array(self.calls)[group.any(axis=0)].sum())))
        return found

    def _on_path(self) -> NDArray[np.bool_]:
        found = np.zeros((len(self.leaves), len(self.parents)), bool)
        for row, leaf in enumerate(self.leaves):
            segment = leaf
            while segment >= 0:
                found[row, segment] = True
                segment = self.parents[segment]
        return found


def coefficients(on_path: NDArray[np.bool_], rewards: Floats, tokens: NDArray[np.int_], credit: str) -> Floats:
    """Return the coefficient of each segment's log-prob in the gradient of a group's objective.

    Args:
        on_path: bool[leaves, segments], whether a segment is on a leaf's path.
        rewards: float64[leaves].
        tokens: int[segments], MODEL tokens.
        credit: one of `CREDITS`. `token-mean` leaves out 1 / (tokens of the batch), which scales an arm's g as a whole.
    """
    paths = on_path.astype(np.float64)
    advantages, leaves = group_advantages(rewards), len(rewards)
    weights = np.full(leaves, 1.0) if credit == CREDITS[0] else 1.0 / np.maximum(paths @ tokens, 1.0)
    if credit == CREDITS[2]:
        below = np.maximum(paths.sum(0), 1.0)
        return np.asarray((advantages @ paths) / below * (weights @ paths) / leaves)
    return np.asarray((weights * advantages) @ paths / leaves)
