"""HAPO's advantage: the group's mean is over tokens instead of trajectories."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arpo_megatron.algorithms.advantages.group import finite, group_advantages, without_signal
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.credit import TreeShape
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """A_i = (r_i - mean) / (std + 1e-6), both over the model tokens of the group.

    HAPO's Token Level Group Average (arXiv 2509.16591v2; eq. 9 according to public notes). Trajectory i counts |o_i|
    times and a shared token once per trajectory, so the advantages of a group's tokens sum to 0; the std is biased. If
    an advantage reaches `token_group_limit` in size, the group gets the advantages of `group` instead. Both follow the
    authors' code (`compute_hapo_outcome_advantage`).
    """

    token_group_limit: float = 5.0
    """5 in the authors' code."""

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Return float64[leaves] per group; zeros if there is nothing to compare."""
        found = []
        for group in groups:
            rewards, counts = finite(group.rewards), TreeShape(group.tree).leaf_model_tokens
            total = counts.sum()
            if total == 0 or without_signal(rewards[counts > 0]):
                found.append(np.zeros_like(rewards))
                continue
            mean = (counts * rewards).sum() / total
            std = np.sqrt((counts * (rewards - mean) ** 2).sum() / total)
            advantages = (rewards - mean) / (std + 1e-6)
            far = (np.abs(advantages[counts > 0]) >= self.token_group_limit).any()
            found.append(group_advantages(rewards, group.tree) if far else advantages)
        return found
