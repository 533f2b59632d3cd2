"""BAPO: the bounds of the ratio move until positive tokens have their share of the objective."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.base import BatchValue, LossBatch
from arpo_megatron.algorithms.losses.batch_tokens import BatchTokens
from arpo_megatron.algorithms.types import Floats

Step = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class Bapo:
    """Balanced policy optimization with adaptive clipping (BAPO, arXiv 2510.18927, eq. 8 and algorithm 1), by public
    code.

    PPO-clip with bounds of the ratio that are chosen for each batch. With P = sum_t pos_t min(r_t, high) and N =
    sum_t |neg_t| max(r_t, low), first low rises from `low_start`, then high from `high_start`, each by its step and at
    most to its end, until P / (P + N) is at least `positive_share`. Ranges and share are the paper's according to the
    README of the authors' code (github.com/WooooDyy/BAPO). Order and step widths are those of the code and its
    `bapo_trainer.yaml`, whose ranges are narrower (0.6 to 0.8, 1.2 to 2). The paper has a share of 0.4 and steps of
    0.02 below and 0.05 above, moves the upper bound first, and weighs each token in P and N by its sampling
    probability.
    """

    dual_clip: float | None
    """Upper bound of the ratio for negative advantages; None: no bound."""
    positive_share: float = 0.5
    """rho_0."""
    low_start: float = 0.6
    """a-, initial lower bound of the ratio (not its distance to 1)."""
    low_end: float = 0.9
    """b-."""
    low_step: Step = 0.05
    """Step width of the lower bound."""
    high_start: float = 1.2
    """a+, initial upper bound of the ratio."""
    high_end: float = 3.0
    """b+."""
    high_step: Step = 0.05
    """Step width of the upper bound."""

    def value(self, batch: LossBatch) -> BatchValue:
        """Return the loss under the chosen bounds, and the coefficient of every token."""
        tokens = BatchTokens.of(batch)
        low, high = self.bounds(tokens.positive, tokens.negative, tokens.ratio)
        return tokens.clipped(low, high, self.dual_clip, tokens.ratio)

    def bounds(self, positive: Floats, negative: Floats, ratio: Floats) -> tuple[float, float]:
        """Choose the lower and the upper bound of the ratio for these tokens."""
        low, high = self.low_start, self.high_start

        def balanced() -> bool:
            gain = float((positive * np.minimum(ratio, high)).sum())
            cost = -float((negative * np.maximum(ratio, low)).sum())
            return gain >= self.positive_share * (gain + cost)

        while not balanced() and low < self.low_end:
            low = min(low + self.low_step, self.low_end)
        while not balanced() and high < self.high_end:
            high = min(high + self.high_step, self.high_end)
        return low, high
