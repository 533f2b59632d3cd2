"""Groups that say something stand in for those that do not."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arpo_megatron.algorithms.advantages.group import finite, without_signal
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class RewardAware:
    """A_i = (groups / groups with spread) * (r_i - mean(r)) / std(r), biased std (RAPO, arXiv 2509.24107, eq. 3 and 6).

    Groups are those of the step. 1e-6 is added to the std.
    """

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """float64[leaves] a group; zeros where it has no spread."""
        every = [finite(group.rewards) for group in groups]
        good = [not without_signal(rewards) for rewards in every]
        scale = len(every) / max(1, sum(good))
        return [
            scale * (rewards - rewards.mean()) / (rewards.std() + 1e-6) if told else np.zeros_like(rewards)
            for rewards, told in zip(every, good, strict=True)
        ]
