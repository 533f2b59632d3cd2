"""MiniRL: REINFORCE with a per-token importance weight against the engine, and PPO's clipping."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.base import BatchValue, LossBatch
from arpo_megatron.algorithms.losses.batch_tokens import BatchTokens, concatenate


@dataclass(frozen=True, slots=True)
class MiniRl:
    """L = -sum w_i A_i M_t sg(min(new / sampling, importance_limit)) logprob_t (arXiv 2512.01374, eq. 7).

    M_t is 0 if PPO would clip (A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low, with r = new / old), else
    1. The weight corrects for older weights and for the engine's arithmetic at once (eq. 5);
    `algorithm.sampling_correction` would correct a second time and is refused. An unknown sampling
    log-prob counts as the old one. The paper sums over tokens; `loss_aggregation=token-mean` equals that up to a
    constant of the batch.
    """

    corrects_for_sampling: ClassVar[bool] = True
    clip_low: float
    """Lower bound of the ratio, as its distance to 1."""
    clip_high: float
    """Upper bound of the ratio, as its distance to 1."""
    importance_limit: Annotated[float, Field(gt=0)] = 5.0
    """Largest weight (truncated importance sampling), 5 in the paper."""

    def value(self, batch: LossBatch) -> BatchValue:
        """Return the loss and the coefficient of every token."""
        tokens = BatchTokens.of(batch)
        weight = np.minimum(tokens.ratio * tokens.mismatch, self.importance_limit)
        high, low = tokens.ratio > 1 + self.clip_high, tokens.ratio < 1 - self.clip_low
        gains = np.where(high, 0.0, tokens.positive * weight)
        costs = np.where(low, 0.0, tokens.negative * weight)
        loss = -float(((gains + costs) * np.nan_to_num(concatenate(batch.logprobs))).sum())
        return tokens.value(
            loss, gains, costs, int((low & (tokens.negative < 0)).sum()), int((high & (tokens.positive > 0)).sum())
        )
