"""The group as baseline: how much better a trajectory is than the others of its task."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from arpo_megatron.algorithms.advantages.lost import centre
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.types import Floats
from arpo_megatron.tree import RolloutTree


@dataclass(frozen=True, slots=True)
class GroupNormalised:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), unbiased std (GRPO, arXiv 2402.03300, section 4.1.2, no equation
    number).

    ARPO (arXiv 2507.19849, section 3.2, no number) and DAPO (arXiv 2503.14476, eq. 9) use the same. The 1e-6 and the
    unbiased std are those of public code.
    """

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Return float64[leaves] per group."""
        return [group_advantages(group.rewards, group.tree) for group in groups]


def group_advantages(rewards: ArrayLike, tree: RolloutTree | None = None) -> Floats:
    """Compute the advantage of each trajectory of one group.

    Args:
        rewards: float[G], one reward per trajectory.
        tree: the tree that holds them, to correct for trajectories that it has lost (`lost`); None: it has lost none.

    Returns:
        float64[G]; zeros if there is nothing to compare (G < 2, or all rewards equal).

    Raises:
        ValueError: the rewards are not a finite vector.
    """
    values = finite(rewards)
    if without_signal(values):
        return np.zeros_like(values)
    centred = values - values.mean() if tree is None else centre(tree, values)
    return np.asarray(centred / (values.std(ddof=1) + 1e-6))


def finite(rewards: ArrayLike) -> Floats:
    """Return rewards as float64[G]. Raises ValueError if they are not a finite vector."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite numbers in one dimension, not {values!r}")
    return values


def without_signal(rewards: Floats) -> bool:
    """Whether there is nothing to compare: fewer than two rewards, or all equal.

    Equality is exact, so that no rounding error is divided by 1e-6.
    """
    return len(rewards) < 2 or np.ptp(rewards) == 0.0
