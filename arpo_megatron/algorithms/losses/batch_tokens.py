"""The tokens of a whole batch as columns, for losses that need all of them at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.algorithms.base import BatchValue, LossBatch
from arpo_megatron.algorithms.credit import TreeCredit, TreeShape
from arpo_megatron.algorithms.importance import bounded_exp
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """All tokens of a batch, tree after tree, in segment-index order: float64[tokens] each."""

    shapes: Sequence[TreeShape]
    positive: Floats
    """Sum over leaves of w_i max(A_i, 0); 0 outside MODEL tokens."""
    negative: Floats
    """Sum over leaves of w_i min(A_i, 0); 0 outside MODEL tokens."""
    weight: Floats
    """Sum over leaves of w_i; 0 outside MODEL tokens."""
    ratio: Floats
    """New over old probability."""
    mismatch: Floats
    """Old over sampling probability: 1 if the engine's arithmetic and weights equal the trainer's, or if the sampling
    log-prob is unknown."""

    @classmethod
    def of(cls, batch: LossBatch, advantages: Sequence[Floats] | None = None) -> Self:
        """Collect the tokens of a batch; `advantages` replace those of the batch."""
        shapes = [TreeShape(tree) for tree in batch.trees]
        credits = [
            shape.token_credit(own, weights)
            for shape, own, weights in zip(shapes, advantages or batch.advantages, batch.weights, strict=True)
        ]
        return cls(
            shapes,
            concatenate([credit.positive for credit in credits]),
            concatenate([credit.negative for credit in credits]),
            concatenate([credit.weight for credit in credits]),
            bounded_exp(np.nan_to_num(concatenate(batch.logprobs) - concatenate(batch.old_logprobs))),
            bounded_exp(np.nan_to_num(concatenate(batch.old_logprobs) - concatenate(batch.sampling_logprobs))),
        )

    def value(self, loss: float, positive: Floats, negative: Floats, low: int, high: int) -> BatchValue:
        """Build the value of a loss from the coefficient of each token's log-prob, given as a positive and a negative
        part.

        Args:
            loss: value of the loss.
            positive: float64[tokens].
            negative: float64[tokens].
            low: number of tokens without gradient because of a lower bound.
            high: number of tokens without gradient because of an upper bound.
        """
        statistics = ratio_statistics(loss, [self.ratio[self.weight > 0]], low, high)
        columns = [self.split(values.astype(np.float32)) for values in (positive, negative, self.weight)]
        return BatchValue(loss, [TreeCredit(*arrays) for arrays in zip(*columns, strict=True)], statistics)

    def clipped(
        self, low: Floats | float, high: Floats | float, most: Floats | float | None, ratio: Floats
    ) -> BatchValue:
        """Return PPO's loss of these tokens for a given ratio and given bounds, dual clip (`most`) included."""
        largest = np.inf if most is None else most
        loss = -float((self.positive * np.minimum(ratio, high) + self.negative * np.clip(ratio, low, largest)).sum())
        gains = np.where(ratio <= high, self.positive * ratio, 0.0)
        costs = np.where((ratio >= low) & (ratio <= largest), self.negative * ratio, 0.0)
        clipped_low, clipped_high = (self.negative < 0) & (ratio < low), (self.positive > 0) & (ratio > high)
        return self.value(loss, gains, costs, int(clipped_low.sum()), int(clipped_high.sum()))

    def split(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Split a column into one array per tree."""
        ends = np.cumsum([shape.lengths.sum() for shape in self.shapes])[:-1]
        return np.split(values, ends) if self.shapes else []

    def masked_share(self, before: "BatchTokens") -> dict[str, float]:
        """Return the share of the credit of `before` that masks have removed, as a statistic of the update."""
        whole, kept = (float((tokens.positive - tokens.negative).sum()) for tokens in (before, self))
        return {"masked_share": 1 - kept / whole if whole else 0.0}


def concatenate(values: Sequence[Any]) -> Floats:
    """Join the arrays of all trees into float64[tokens]; no trees give an empty array."""
    return np.concatenate([np.zeros(0), *values])


def ratio_statistics(loss: float, ratios: Sequence[Floats], clipped_low: int, clipped_high: int) -> dict[str, Any]:
    """Return the statistics of a loss under the names of the token-level ones, as means over `ratios`; empty without
    ratios.

    Args:
        loss: value of the loss of the batch.
        ratios: float64[n] per tree, of its trajectories or tokens.
        clipped_low: number of ratios without gradient because of the lower bound.
        clipped_high: number of ratios without gradient because of the upper bound.
    """
    values = concatenate(ratios)
    if not len(values):
        return {}
    p01, p50, p99 = np.quantile(values, [0.01, 0.5, 0.99])
    return {
        "loss": loss,
        "loss_policy": loss,
        "clip_low_share": clipped_low / len(values),
        "clip_high_share": clipped_high / len(values),
        "ratio_max": float(values.max()),
        "ratio_mean": float(values.mean()),
        "ratio_p01": float(p01),
        "ratio_p50": float(p50),
        "ratio_p99": float(p99),
    }
