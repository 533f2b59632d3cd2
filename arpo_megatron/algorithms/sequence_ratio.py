"""Losses whose ratio belongs to a whole trajectory, on the tree: one sum from the root to the leaves, one back.

A sequence-level ratio needs the log-ratios of all tokens of a trajectory, and its gradient weighs each of them alike.
With the ratios held constant (their gradient is a multiple of themselves) the loss of a minibatch is linear in the
log-probs of its tokens, so a shared token needs one coefficient: the sum over the trajectories that hold it. Sums of
log-ratios run down the tree, sums of coefficients run up, and training is one backward pass of
`-sum(coefficient * logprob)`, in every layout, because the controller does this from the log-probs of the packs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arpo_megatron.algorithms.credit import TreeCredit, TreeShape
from arpo_megatron.tree import RolloutTree

_Floats = NDArray[np.float64]

MAX_LOG_RATIO = 20.0
"""Log-ratios are limited to this in both directions before they are exponentiated, in the token-level losses too: an
infinite ratio that is clipped away has gradient 0 * inf."""


@dataclass(frozen=True, slots=True)
class SequenceLoss:
    """A sequence-level loss of one minibatch and what it asks of each token.

    Attributes:
        loss: its value.
        credits: one a tree; `positive` + `negative` is the coefficient of a token, `weight` the sum of its
            trajectories' weights w_i / |o_i|.
        ratios: for each tree float64[leaves].
        clipped_low: trajectories whose gradient the lower bound removed.
        clipped_high: likewise the upper bound.
    """

    loss: float
    credits: list[TreeCredit]
    ratios: list[_Floats]
    clipped_low: int
    clipped_high: int

    def statistics(self) -> dict[str, Any]:
        """Figures under the names of the token-level ones; means over trajectories. Empty without trajectories."""
        if not self.ratios:
            return {}
        ratios = np.concatenate(self.ratios)
        p01, p50, p99 = np.quantile(ratios, [0.01, 0.5, 0.99])
        return {
            "loss": self.loss,
            "loss_policy": self.loss,
            "clip_low_share": self.clipped_low / len(ratios),
            "clip_high_share": self.clipped_high / len(ratios),
            "ratio_max": float(ratios.max()),
            "ratio_mean": float(ratios.mean()),
            "ratio_p01": float(p01),
            "ratio_p50": float(p50),
            "ratio_p99": float(p99),
        }


def gspo(
    trees: Sequence[RolloutTree],
    advantages: Sequence[ArrayLike],
    log_ratios: Sequence[ArrayLike],
    *,
    clip_low: float,
    clip_high: float,
    trajectory_weights: Sequence[ArrayLike] | None = None,
) -> SequenceLoss:
    """Group sequence policy optimization (arXiv 2507.18071, eq. 5 to 7) on trees.

    With s_i = exp(mean over the model tokens of trajectory i of new - old log-prob),
    L = -(1 / trajectories) * sum_i v_i * min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i), and where that is
    the unclipped one, its gradient is -(1 / trajectories) * sum_i v_i A_i s_i / |o_i| * sum_t grad logprob_t.

    Args:
        trees: of one minibatch.
        advantages: for each tree float[leaves].
        log_ratios: for each tree float[tokens] in segment-index order, new less old log-prob in nats; what stands
            outside MODEL segments is ignored.
        clip_low: lower bound of the ratio, as its distance to 1.
        clip_high: upper bound likewise.
        trajectory_weights: v_i, for each tree float[leaves]; None: 1.
    """
    shapes = [TreeShape(tree) for tree in trees]
    count = max(1, sum(len(shape.leaves) for shape in shapes))
    weights = trajectory_weights or [np.ones(len(shape.leaves)) for shape in shapes]
    loss, low, high = 0.0, 0, 0
    credits, ratios = list[TreeCredit](), list[_Floats]()
    for shape, given, values, own in zip(shapes, advantages, log_ratios, weights, strict=True):
        advantage, weight = np.asarray(given, np.float64), np.asarray(own, np.float64) / count
        length = np.maximum(shape.leaf_model_tokens, 1.0)
        mean = shape.sum_to_leaves(np.asarray(values, np.float64)) / length
        ratio = np.exp(np.clip(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        bounded = np.clip(ratio, 1 - clip_low, 1 + clip_high)
        free = ratio * advantage <= bounded * advantage
        loss -= float((weight * np.minimum(ratio * advantage, bounded * advantage)).sum())
        low += int((~free & (ratio < bounded)).sum())
        high += int((~free & (ratio > bounded)).sum())
        coefficient = np.where(free, weight * advantage * ratio / length, 0.0)
        credits.append(shape.spread_leaves(np.maximum(coefficient, 0), np.minimum(coefficient, 0), weight / length))
        ratios.append(ratio)
    return SequenceLoss(loss, credits, ratios, low, high)


def trajectory_weights(trees: Sequence[RolloutTree], log_ratios: Sequence[ArrayLike], *, limit: float) -> list[_Floats]:
    """Truncated importance weights min(limit, product of old over sampling probability) of whole trajectories.

    They correct for trajectories that another policy (an older version, or the engine's arithmetic) has sampled.

    Args:
        trees: of one minibatch.
        log_ratios: for each tree float[tokens] in segment-index order, log-prob under the policy of the step less the
            one under which the token was sampled, in nats; NaN counts as 0 (unknown).
        limit: largest weight.

    Returns:
        for each tree float64[leaves].
    """
    found = []
    for tree, values in zip(trees, log_ratios, strict=True):
        sums = TreeShape(tree).sum_to_leaves(np.nan_to_num(np.asarray(values, np.float64)))
        found.append(np.minimum(np.exp(np.clip(sums, -MAX_LOG_RATIO, MAX_LOG_RATIO)), limit))
    return found
