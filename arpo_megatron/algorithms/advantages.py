"""Advantages: how much better a trajectory did than the others of its group."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def group_advantages(rewards: ArrayLike) -> NDArray[np.float64]:
    """Advantage of each trajectory of one group (GRPO, arXiv 2402.03300; ARPO uses the same).

    A_i = (r_i - mean(r)) / (std(r) + 1e-6) with the unbiased standard deviation.

    Args:
        rewards: float[G], one reward a trajectory.

    Returns:
        float64[G]; zeros where the group has nothing to compare (G < 2, or all rewards equal).

    Raises:
        ValueError: rewards that are not a finite vector.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite numbers in one dimension, not {values!r}")
    if len(values) < 2 or np.ptp(values) == 0.0:  # equal rewards exactly: no rounding error over 1e-6
        return np.zeros_like(values)
    advantages: NDArray[np.float64] = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    return advantages
