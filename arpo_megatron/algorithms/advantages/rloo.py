"""Leave one out: the baseline of a trajectory is the mean reward of the others."""

from collections.abc import Sequence
from dataclasses import dataclass

from arpo_megatron.algorithms.advantages.group import finite
from arpo_megatron.algorithms.advantages.lost import centre
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """A_i = r_i - mean of r_j over j != i = G / (G - 1) * (r_i - mean(r)) (RLOO, arXiv 2402.14740, eq. 8).

    LOOP (arXiv 2502.01600, eq. 3 and algorithm 1) combines it with PPO-clip over the interactions of an agent.
    """

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Return float64[leaves] per group; zeros if there is nothing to compare."""
        sizes = [group.tree.planned for group in groups]
        return [
            size / max(1, size - 1) * centre(group.tree, finite(group.rewards))
            for size, group in zip(sizes, groups, strict=True)
        ]
