"""RAPO's advantage: groups with spread get the weight of groups without."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arpo_megatron.algorithms.advantages.group import finite, without_signal
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class RewardAware:
    """A_i = (groups / groups with spread) * (r_i - mean(r)) / std(r), biased std (RAPO, arXiv 2509.24107, eq. 3 and 6).

    The counts are those of the step; 1e-6 is added to the std.
    """

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Return float64[leaves] per group; zeros for a group without spread."""
        all_rewards = [finite(group.rewards) for group in groups]
        informative = [not without_signal(rewards) for rewards in all_rewards]
        scale = len(all_rewards) / max(1, sum(informative))
        return [
            scale * (rewards - rewards.mean()) / (rewards.std() + 1e-6) if has_spread else np.zeros_like(rewards)
            for rewards, has_spread in zip(all_rewards, informative, strict=True)
        ]
