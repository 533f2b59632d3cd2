"""The group as its own baseline: how much better a trajectory did than the others of its task."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class GroupNormalised:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), unbiased std (GRPO, arXiv 2402.03300, section 4.1.2, unnumbered).

    ARPO (arXiv 2507.19849, section 3.2, unnumbered) and DAPO (arXiv 2503.14476, eq. 9) use the same. The 1e-6 and the
    unbiased std are those of public code.
    """

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """float64[leaves] a group."""
        return [group_advantages(group.rewards) for group in groups]


def group_advantages(rewards: ArrayLike) -> Floats:
    """Advantage of each trajectory of one group.

    Args:
        rewards: float[G], one reward a trajectory.

    Returns:
        float64[G]; zeros where the group has nothing to compare (G < 2, or all rewards equal).

    Raises:
        ValueError: rewards that are not a finite vector.
    """
    values = finite(rewards)
    if without_signal(values):
        return np.zeros_like(values)
    advantages: Floats = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    return advantages


def finite(rewards: ArrayLike) -> Floats:
    """As float64[G]. Raises ValueError where they are not a finite vector."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite numbers in one dimension, not {values!r}")
    return values


def without_signal(rewards: Floats) -> bool:
    """Nothing to compare: fewer than two, or all equal exactly, so that no rounding error is divided by 1e-6."""
    return len(rewards) < 2 or np.ptp(rewards) == 0.0
