"""HAPO: bounds and advantages that depend on the entropy of each token."""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.base import BatchValue, LossBatch
from arpo_megatron.algorithms.losses.batch_tokens import BatchTokens, concatenate
from arpo_megatron.algorithms.types import Floats

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Hapo:
    """PPO-clip with bounds and an advantage factor per token (HAPO, arXiv 2509.16591), by the authors' code.

    It implements Asymmetric Adaptive Clipping (eq. 12 and 13 of version 2) and Differential Advantage Redistribution
    (eq. 10 and 11). h_t in [-1, 1] (eq. 5 and 6) is log H_t minus its quantile `hapo_pivot` over the batch, divided by
    the largest positive difference if it is positive, else by the size of the largest negative one.

        upper bound   1 + clip_high * (1 + hapo_clip * h_t) if h_t > 0, else 1 + clip_high
        lower bound   1 - clip_low * (1 - hapo_clip * h_t) if h_t <= 0, else 1 - clip_low
        advantage     A * (1 + hapo_advantage * h_t) if h_t > 0 and the ratio is outside the inner half of its bounds,
                      or if h_t <= 0 and the ratio is inside; else A

    H_t is the entropy under the policy of the step, over the whole batch and all copies of a shared token. The code
    uses the policy in training and a micro-batch, so its loss depends on batching. The code also divides h by a
    standard deviation first, which cancels. Adaptive sampling temperature is not implemented.
    The arithmetic follows the code; the equation numbers come from public notes and were not checked in the paper.
    """

    clip_low: float
    """Lower bound of the ratio, as its distance to 1."""
    clip_high: float
    """Upper bound of the ratio, as its distance to 1."""
    dual_clip: float | None
    """Upper bound of the ratio for negative advantages; None: no bound."""
    hapo_pivot: Share = 0.8
    """Quantile of the entropies above which a token counts as uncertain."""
    hapo_clip: Share = 1.0
    """How far entropy moves the bounds."""
    hapo_advantage: Share = 1.0
    """How much entropy changes the advantages."""

    def value(self, batch: LossBatch) -> BatchValue:
        """Return the loss and the coefficient of every token."""
        tokens = BatchTokens.of(batch)
        height = self._heights(tokens, concatenate(batch.entropies))
        wide, narrow = np.maximum(height, 0.0), np.minimum(height, 0.0)
        high, low = self.clip_high * (1 + self.hapo_clip * wide), self.clip_low * (1 - self.hapo_clip * narrow)
        inside = (tokens.ratio > 1 - low / 2) & (tokens.ratio < 1 + high / 2)
        scale = np.where((height > 0) != inside, 1 + self.hapo_advantage * height, 1.0)
        tokens = replace(tokens, positive=tokens.positive * scale, negative=tokens.negative * scale)
        return tokens.clipped(1 - low, 1 + high, self.dual_clip, tokens.ratio)

    def _heights(self, tokens: BatchTokens, entropies: Floats) -> Floats:
        """Return h of every token; 0 outside MODEL tokens."""
        copies = concatenate([shape.copies for shape in tokens.shapes]).astype(int)
        if not copies.sum():
            return np.zeros_like(entropies)
        logs = np.log(np.maximum(np.nan_to_num(entropies), 1e-8))
        height = logs - np.quantile(np.repeat(logs, copies), self.hapo_pivot, method="nearest")
        own = height[copies > 0]
        scale = np.where(height > 0, max(own.max(), 1e-8), max(-own.min(), 1e-8))
        found: Floats = np.where(copies > 0, height / scale, 0.0)
        return found
