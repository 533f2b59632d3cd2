"""Rewards minus the mean of their group, without division by the spread."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arpo_megatron.algorithms.advantages.group import finite, without_signal
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class Centred:
    """A_i = r_i - mean(r) (MiniRL, arXiv 2512.01374, section 4.1; Dr. GRPO, arXiv 2503.20783, has the same)."""

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Return float64[leaves] per group."""
        rewards = [finite(group.rewards) for group in groups]
        # Equal rewards give exact zeros, without rounding errors.
        return [np.zeros_like(r) if without_signal(r) else r - r.mean() for r in rewards]
