"""IPA: one ratio per chunk of interaction, and imitation without a ratio if the outcome was good."""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.base import BatchValue, LossBatch
from arpo_megatron.algorithms.credit import TreeShape
from arpo_megatron.algorithms.importance import bounded_exp
from arpo_megatron.algorithms.losses.batch_tokens import BatchTokens, concatenate
from arpo_megatron.algorithms.turns import turns
from arpo_megatron.algorithms.types import Floats
from arpo_megatron.tree import RolloutTree


@dataclass(frozen=True, slots=True)
class Ipa:
    """L = -sum w_i m_c f_c A_is logprob_t, f_c = 1 if A > 0, else sg(min(rho_c, 1)) (ROME, arXiv 2512.24873, eq. 9).
    Experimental: the formula comes from public notes on the paper.

    For a chunk c (a turn) rho_c = exp(mean of new - old log-prob), and m_c = 1 if exp(mean of old - sampling log-prob)
    is at most `chunk_mismatch`, else 0 (eq. 8). Good chunks are imitated; bad ones are trained against with truncated
    importance sampling. The equations come from public notes on the paper and the limit from a public training run.
    Resampling from chunks of expert trajectories is not implemented. An unknown sampling log-prob counts as the old
    one.
    """

    chunk_mismatch: Annotated[float, Field(gt=0)] = 5.0
    """H."""

    def value(self, batch: LossBatch) -> BatchValue:
        """Return the loss and the coefficient of every token."""
        whole = BatchTokens.of(batch)
        factors, kept = list[Floats](), list[Floats]()
        for number, tree in enumerate(batch.trees):
            shape, own = whole.shapes[number], batch.advantages[number]
            advantage = np.broadcast_to(own if own.ndim == 2 else own[:, None], shape.on_path.shape)
            drift = _chunk_ratios(tree, shape, batch.logprobs[number] - batch.old_logprobs[number])
            mismatch = _chunk_ratios(tree, shape, batch.old_logprobs[number] - batch.sampling_logprobs[number])
            kept.append(np.where(mismatch <= self.chunk_mismatch, advantage, 0.0))
            factors.append(kept[-1] * np.where(advantage > 0, 1.0, np.minimum(drift, 1.0)))
        tokens, unmasked = BatchTokens.of(batch, factors), BatchTokens.of(batch, kept)
        loss = -float(((tokens.positive + tokens.negative) * np.nan_to_num(concatenate(batch.logprobs))).sum())
        value = tokens.value(loss, tokens.positive, tokens.negative, 0, 0)
        return replace(value, statistics={**value.statistics, **unmasked.masked_share(whole)})


def _chunk_ratios(tree: RolloutTree, shape: TreeShape, log_ratios: Floats) -> Floats:
    """Return float64[leaves, segments]: exp of the mean log-ratio over the turn of each segment on that leaf's path."""
    sums = shape.sum_of_segments(np.nan_to_num(log_ratios))
    found = np.ones(shape.on_path.shape)
    for row, leaf in enumerate(shape.leaves):
        for turn in turns(tree, int(leaf)):
            own = list(turn.segments)
            found[row, own] = bounded_exp(sums[own].sum() / turn.tokens)
    return found
