"""HAPO: bounds and advantages that follow the entropy of each token."""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.base import Batch, MinibatchValue
from arpo_megatron.algorithms.losses.batch_tokens import BatchTokens, joined
from arpo_megatron.algorithms.types import Floats

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Hapo:
    """PPO-clip with bounds and advantages of each token's own (HAPO, arXiv 2509.16591), by the authors' code.

    What the paper calls Asymmetric Adaptive Clipping (eq. 12 and 13 of version 2, as public notes on it number them)
    and Differential Advantage Redistribution (eq. 10 and 11).

    h_t (eq. 5 and 6) is log H_t less its quantile `hapo_pivot` over the minibatch, divided by the largest such
    difference where it is positive and by the largest negative one's size where not: in [-1, 1].

        upper bound   1 + clip_high * (1 + hapo_clip * h_t) where h_t > 0, else 1 + clip_high
        lower bound   1 - clip_low * (1 - hapo_clip * h_t) where h_t <= 0, else 1 - clip_low
        advantage     A * (1 + hapo_advantage * h_t) where h_t > 0 and the ratio is outside of the inner half of its
                      bounds, or h_t <= 0 and it is inside; else A

    H_t is the entropy under the policy of the step, over the whole minibatch and all copies of a shared token (the code
    has that of the policy in training, over a micro-batch, so that its loss depends on batching). The code divides h by
    a standard deviation first, which cancels. Adaptive sampling temperature is no part of this.

    Attributes:
        clip_low: lower bound of the ratio, as its distance to 1.
        clip_high: upper bound likewise.
        dual_clip: upper bound of the ratio for negative advantages; None: none.
        hapo_pivot: quantile of the entropies above which a token counts as uncertain.
        hapo_clip: how far entropy moves the bounds.
        hapo_advantage: how much it moves the advantages.
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None
    hapo_pivot: Share = 0.8
    hapo_clip: Share = 1.0
    hapo_advantage: Share = 1.0

    def value(self, batch: Batch) -> MinibatchValue:
        """The loss and the coefficient of every token."""
        tokens = BatchTokens.of(batch)
        height = self._heights(tokens, joined(batch.entropies))
        wide, narrow = np.maximum(height, 0.0), np.minimum(height, 0.0)
        high, low = self.clip_high * (1 + self.hapo_clip * wide), self.clip_low * (1 - self.hapo_clip * narrow)
        inside = (tokens.ratio > 1 - low / 2) & (tokens.ratio < 1 + high / 2)
        scale = np.where((height > 0) != inside, 1 + self.hapo_advantage * height, 1.0)
        tokens = replace(tokens, positive=tokens.positive * scale, negative=tokens.negative * scale)
        return tokens.clipped(1 - low, 1 + high, self.dual_clip, tokens.ratio)

    def _heights(self, tokens: BatchTokens, entropies: Floats) -> Floats:
        """h of every token; 0 outside of MODEL tokens."""
        copies = joined([shape.spread(shape.below.sum(0).astype(np.float64)) for shape in tokens.shapes]).astype(int)
        if not copies.sum():
            return np.zeros_like(entropies)
        logs = np.log(np.maximum(np.nan_to_num(entropies), 1e-8))
        height = logs - np.quantile(np.repeat(logs, copies), self.hapo_pivot, method="nearest")
        own = height[copies > 0]
        scale = np.where(height > 0, max(own.max(), 1e-8), max(-own.min(), 1e-8))
        found: Floats = np.where(copies > 0, height / scale, 0.0)
        return found
