"""SPEAR: a bonus for tool calls that fades during training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arpo_megatron.rewards.base import ResponseGroup, Score


@dataclass(frozen=True, slots=True)
class FadingToolBonus:
    """min(1, 0.1 * calls) * (1 + cos(pi * t / T)) / 2 in step t, and 0 from step T on.

    SPEAR (arXiv 2509.22601), as in its released code (retool/recipe/retool/reward.py, `cosine`), where right answers
    earn 1 and wrong ones -1. Public notes give it as eq. 6 and 14 of version 4, which was not checked in the paper.
    """

    needs_judge: ClassVar[bool] = False
    fade_steps: int = 200
    """T."""

    def __post_init__(self) -> None:
        if self.fade_steps < 1:
            raise ValueError(f"fade_steps must be positive, not {self.fade_steps}")

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> list[float]:
        """Return a value for each response."""
        left = (1.0 + math.cos(math.pi * min(1.0, group.step / self.fade_steps))) / 2.0
        return [min(1.0, 0.1 * response.calls) * left for response in group.responses]
