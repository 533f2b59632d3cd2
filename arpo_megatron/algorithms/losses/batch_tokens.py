"""What losses of whole minibatches have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.algorithms.base import Batch, MinibatchValue
from arpo_megatron.algorithms.credit import TreeCredit, TreeShape
from arpo_megatron.algorithms.importance import bounded_exp
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """All tokens of a minibatch, tree after tree, in segment-index order: float64[tokens] each.

    Attributes:
        shapes: of the trees.
        positive: sum over leaves of w_i max(A_i, 0); 0 outside of MODEL tokens, like the next two.
        negative: sum over leaves of w_i min(A_i, 0).
        weight: sum over leaves of w_i.
        ratio: new over old probability.
        mismatch: old over sampling probability, which is 1 where the engine's arithmetic and weights are the trainer's;
            1 where the sampling log-prob is unknown.
    """

    shapes: Sequence[TreeShape]
    positive: Floats
    negative: Floats
    weight: Floats
    ratio: Floats
    mismatch: Floats

    @classmethod
    def of(cls, batch: Batch, advantages: Sequence[Floats] | None = None) -> Self:
        """Of a minibatch, with `advantages` in place of its own."""
        shapes = [TreeShape(tree) for tree in batch.trees]
        credits = [
            shape.token_credit(own, weights)
            for shape, own, weights in zip(shapes, advantages or batch.advantages, batch.weights, strict=True)
        ]
        return cls(
            shapes,
            joined([credit.positive for credit in credits]),
            joined([credit.negative for credit in credits]),
            joined([credit.weight for credit in credits]),
            bounded_exp(np.nan_to_num(joined(batch.logprobs) - joined(batch.old_logprobs))),
            bounded_exp(np.nan_to_num(joined(batch.old_logprobs) - joined(batch.sampling_logprobs))),
        )

    def value(self, loss: float, positive: Floats, negative: Floats, low: int, high: int) -> MinibatchValue:
        """From the coefficient of each token's log-prob in two parts, and how many tokens a bound left without one."""
        told = ratio_statistics(loss, [self.ratio[self.weight > 0]], low, high)
        columns = [self.split(values.astype(np.float32)) for values in (positive, negative, self.weight)]
        return MinibatchValue(loss, [TreeCredit(*parts) for parts in zip(*columns, strict=True)], told)

    def clipped(
        self, low: Floats | float, high: Floats | float, most: Floats | float | None, ratio: Floats
    ) -> MinibatchValue:
        """PPO's loss of these tokens with a ratio and bounds of their own, dual clip included."""
        largest = np.inf if most is None else most
        loss = -float((self.positive * np.minimum(ratio, high) + self.negative * np.clip(ratio, low, largest)).sum())
        gains = np.where(ratio <= high, self.positive * ratio, 0.0)
        costs = np.where((ratio >= low) & (ratio <= largest), self.negative * ratio, 0.0)
        cut_low, cut_high = (self.negative < 0) & (ratio < low), (self.positive > 0) & (ratio > high)
        return self.value(loss, gains, costs, int(cut_low.sum()), int(cut_high.sum()))

    def split(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """A column tree by tree."""
        ends = np.cumsum([shape.lengths.sum() for shape in self.shapes])[:-1]
        return np.split(values, ends) if self.shapes else []

    def masked_share(self, before: "BatchTokens") -> dict[str, float]:
        """What masks took away from `before`, by the size of its credit, as a statistic of the update."""
        whole, left = (float((own.positive - own.negative).sum()) for own in (before, self))
        return {"masked_share": 1 - left / whole if whole else 0.0}


def joined(values: Sequence[Any]) -> Floats:
    """float64[tokens] of all trees in one; of none, empty."""
    return np.concatenate([np.zeros(0), *values])


def ratio_statistics(loss: float, ratios: Sequence[Floats], clipped_low: int, clipped_high: int) -> dict[str, Any]:
    """Figures under the names of the token-level ones, here means over `ratios`; empty without any.

    Args:
        loss: of the minibatch.
        ratios: float64[n], of the trajectories or tokens of each tree.
        clipped_low: how many of them the lower bound has left without gradient.
        clipped_high: likewise the upper bound.
    """
    every = np.concatenate([np.zeros(0), *ratios])
    if not len(every):
        return {}
    p01, p50, p99 = np.quantile(every, [0.01, 0.5, 0.99])
    return {
        "loss": loss,
        "loss_policy": loss,
        "clip_low_share": clipped_low / len(every),
        "clip_high_share": clipped_high / len(every),
        "ratio_max": float(every.max()),
        "ratio_mean": float(every.mean()),
        "ratio_p01": float(p01),
        "ratio_p50": float(p50),
        "ratio_p99": float(p99),
    }
