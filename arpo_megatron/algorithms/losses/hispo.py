"""HisPO: tokens and trajectories get no gradient if engine and trainer disagree about their probability."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.base import BatchValue, LossBatch
from arpo_megatron.algorithms.losses.batch_tokens import BatchTokens
from arpo_megatron.algorithms.types import Floats

Limit = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class Hispo:
    """PPO-clip of the whole ratio new / sampling = d_t * r_t under two masks (LongCat-Flash-Prover, arXiv 2603.21065).
    Experimental: the formula comes from public notes on the paper.

    With d_t = old / sampling (train-inference discrepancy) and r_t = new / old (staleness), a token counts if

        |exp(mean of log d over its trajectory) - 1| < hispo_sequence   and   |d_t - 1| < hispo_token

    Three bounds limit the ratio: 1 + clip_high for A > 0, 1 - clip_low and dual_clip for A < 0. Masks, decomposition
    and bounds come from public notes on the paper. The notes do not say whether the bounds apply to d * r or to r,
    between which the masks leave little room, nor give the two limits; those here are ours. An unknown sampling
    log-prob counts as the old one.
    """

    corrects_for_sampling: ClassVar[bool] = True
    clip_low: float
    """Lower bound of the ratio, as its distance to 1."""
    clip_high: float
    """Upper bound of the ratio, as its distance to 1."""
    dual_clip: float | None
    """Upper bound of the ratio for negative advantages; None: no bound."""
    hispo_sequence: Limit = 0.05
    """delta_seq."""
    hispo_token: Limit = 1.0
    """delta_tok."""

    def value(self, batch: LossBatch) -> BatchValue:
        """Return the loss and the coefficient of every token."""
        differences = [old - new for old, new in zip(batch.old_logprobs, batch.sampling_logprobs, strict=True)]
        whole = BatchTokens.of(batch)
        kept = list[Floats]()
        for shape, own, difference in zip(whole.shapes, batch.advantages, differences, strict=True):
            mean = shape.sum_to_leaves(np.nan_to_num(difference)) / np.maximum(1.0, shape.leaf_model_tokens)
            keep = np.abs(np.expm1(mean)) < self.hispo_sequence
            kept.append(own * (keep if own.ndim == 1 else keep[:, None]))
        tokens, keep = BatchTokens.of(batch, kept), np.abs(whole.mismatch - 1) < self.hispo_token
        tokens = replace(tokens, positive=tokens.positive * keep, negative=tokens.negative * keep)
        value = tokens.clipped(1 - self.clip_low, 1 + self.clip_high, self.dual_clip, tokens.ratio * tokens.mismatch)
        return replace(value, statistics={**value.statistics, **tokens.masked_share(whole)})
