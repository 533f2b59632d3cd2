"""EAPO: a right answer earns less the more rounds it took."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arpo_megatron.rewards.base import ResponseGroup, Score


@dataclass(frozen=True, slots=True)
class GeometricDiscount:
    """accuracy * (discount^(T-1) - 1), so with weight 1 the accuracy counts discount^(T-1) times.

    EAPO (IterResearch, arXiv 2511.07327, eq. 3). T is the number of rounds: tool calls plus the answer. The paper
    rewards round t of T with discount^(T-t) * R; this is the reward of its first round, for the whole trajectory. (A
    reward per round would be an advantage estimator.)

    Experimental: the formula comes from the paper's abstract and reviews, not from the paper or its authors' code.
    """

    needs_judge: ClassVar[bool] = False
    discount: float = 0.995

    def __post_init__(self) -> None:
        if not 0.0 < self.discount <= 1.0:
            raise ValueError(f"discount must be above 0 and at most 1, not {self.discount}")

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> list[float]:
        """Return a value for each response."""
        return [
            score.accuracy * (self.discount**response.calls - 1.0)
            for score, response in zip(scores, group.responses, strict=True)
        ]
