"""BAPO: the bounds of the ratio move until positive tokens have their share of the objective."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.base import Batch, MinibatchValue
from arpo_megatron.algorithms.losses.batch_tokens import BatchTokens
from arpo_megatron.algorithms.types import Floats

Step = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class Bapo:
    """Balanced policy optimization with adaptive clipping (arXiv 2510.18927, eq. 8 and algorithm 1), by public code.

    PPO-clip with bounds of the ratio that are found for each minibatch. With P = sum_t pos_t min(r_t, high) and
    N = sum_t |neg_t| max(r_t, low), low rises from `low_start` and then high from `high_start`, each by its step and to
    its end at most, until P / (P + N) is at least `positive_share`. Ranges and share are those that the README of the
    authors' code (github.com/WooooDyy/BAPO) gives as the paper's; order and widths of the steps are those of the code
    and its `bapo_trainer.yaml`, whose ranges are narrower (0.6 to 0.8, 1.2 to 2). The paper itself has a share of 0.4
    and steps of 0.02 below and 0.05 above, moves the upper bound first, and weighs each token in P and N by the
    probability with which it was sampled, too.

    Attributes:
        positive_share: rho_0.
        low_start: a-, lower bound of the ratio at first (not its distance to 1).
        low_end: b-.
        low_step: how far it moves at a time.
        high_start: a+.
        high_end: b+.
        high_step: likewise.
        dual_clip: upper bound of the ratio for negative advantages; None: none.
    """

    dual_clip: float | None
    positive_share: float = 0.5
    low_start: float = 0.6
    low_end: float = 0.9
    low_step: Step = 0.05
    high_start: float = 1.2
    high_end: float = 3.0
    high_step: Step = 0.05

    def value(self, batch: Batch) -> MinibatchValue:
        """The loss under the bounds that were found, and the coefficient of every token."""
        tokens = BatchTokens.of(batch)
        low, high = self.bounds(tokens.positive, tokens.negative, tokens.ratio)
        return tokens.clipped(low, high, self.dual_clip, tokens.ratio)

    def bounds(self, positive: Floats, negative: Floats, ratio: Floats) -> tuple[float, float]:
        """The lower and the upper bound of the ratio for these tokens."""
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
