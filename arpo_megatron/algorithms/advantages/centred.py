"""Rewards minus the mean of their group, without division by the spread."""

from collections.abc import Sequence
from dataclasses import dataclass

from arpo_megatron.algorithms.advantages.group import finite
from arpo_megatron.algorithms.advantages.lost import centre
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class Centred:
    """A_i = r_i - mean(r) (MiniRL, arXiv 2512.01374, section 4.1; Dr. GRPO, arXiv 2503.20783, has the same)."""

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Return float64[leaves] per group."""
        return [centre(group.tree, finite(group.rewards)) for group in groups]
