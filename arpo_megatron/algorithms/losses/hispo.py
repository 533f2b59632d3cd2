"""HisPO: what the engine sampled with other probabilities than the trainer's is not learnt from."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.base import Batch, MinibatchValue
from arpo_megatron.algorithms.losses.batch_tokens import BatchTokens
from arpo_megatron.algorithms.types import Floats

Limit = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class Hispo:
    """PPO-clip of the whole ratio new / sampling = d_t * r_t under two masks (LongCat-Flash-Prover, arXiv 2603.21065).

    With d_t = old / sampling (train-inference discrepancy) and r_t = new / old (staleness), a token counts where

        |exp(mean of log d over its trajectory) - 1| < hispo_sequence   and   |d_t - 1| < hispo_token

    Three bounds hold the ratio: 1 + clip_high for A > 0, 1 - clip_low and dual_clip for A < 0. Masks, decomposition
    and the three bounds are the paper's as public notes on it quote them. They do not say whether the bounds hold d * r
    or r alone, between which the masks leave little room, nor what the two limits are: those here are ours. A sampling
    log-prob that is unknown counts as the old one.

    Attributes:
        clip_low: lower bound of the ratio, as its distance to 1.
        clip_high: upper bound likewise.
        dual_clip: upper bound of the ratio for negative advantages; None: none.
        hispo_sequence: delta_seq.
        hispo_token: delta_tok.
    """

    corrects_for_sampling: ClassVar[bool] = True
    clip_low: float
    clip_high: float
    dual_clip: float | None
    hispo_sequence: Limit = 0.05
    hispo_token: Limit = 1.0

    def value(self, batch: Batch) -> MinibatchValue:
        """The loss and the coefficient of every token."""
        apart = [old - drawn for old, drawn in zip(batch.old_logprobs, batch.sampling_logprobs, strict=True)]
        whole = BatchTokens.of(batch)
        kept = list[Floats]()
        for shape, given, difference in zip(whole.shapes, batch.advantages, apart, strict=True):
            mean = shape.sum_to_leaves(np.nan_to_num(difference)) / np.maximum(1.0, shape.leaf_model_tokens)
            keep = np.abs(np.expm1(mean)) < self.hispo_sequence
            kept.append(given * (keep if given.ndim == 1 else keep[:, None]))
        tokens, keep = BatchTokens.of(batch, kept), np.abs(whole.mismatch - 1) < self.hispo_token
        tokens = replace(tokens, positive=tokens.positive * keep, negative=tokens.negative * keep)
        found = tokens.clipped(1 - self.clip_low, 1 + self.clip_high, self.dual_clip, tokens.ratio * tokens.mismatch)
        return replace(found, statistics={**found.statistics, **tokens.masked_share(whole)})
