"""Leave one out: the baseline of a trajectory is the mean of the others."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arpo_megatron.algorithms.advantages.group import finite, without_signal
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """A_i = r_i - mean of r_j over j != i = G / (G - 1) * (r_i - mean(r)) (RLOO, arXiv 2402.14740, eq. 8).

    LOOP (arXiv 2502.01600, eq. 3 and algorithm 1) uses the same with PPO-clip over whole interactions of an agent.
    """

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """float64[leaves] a group; zeros where there is nothing to compare."""
        found = []
        for rewards in (finite(group.rewards) for group in groups):
            if without_signal(rewards):
                found.append(np.zeros_like(rewards))
            else:
                found.append(len(rewards) / (len(rewards) - 1) * (rewards - rewards.mean()))
        return found
