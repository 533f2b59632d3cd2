"""Group sequence policy optimization on the tree: one ratio per trajectory.

A sequence-level ratio needs the log-ratios of all tokens of a trajectory, and its gradient weighs each of them equally.
With the ratios held constant (their gradient is a multiple of themselves) the loss of a batch is linear in the
log-probs of its tokens, so a shared token needs one coefficient: the sum over the trajectories that hold it. Sums of
log-ratios run down the tree and sums of coefficients run up. Training is one backward pass of `-sum(coefficient *
logprob)` in every layout, because the controller computes the coefficients from the log-probs of the packs.
"""

from dataclasses import dataclass

import numpy as np

from arpo_megatron.algorithms.base import BatchValue, LossBatch
from arpo_megatron.algorithms.credit import TreeCredit, TreeShape
from arpo_megatron.algorithms.importance import bounded_exp
from arpo_megatron.algorithms.losses.batch_tokens import ratio_statistics
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class Gspo:
    """GSPO (arXiv 2507.18071, eq. 5 to 7); GSPO-token (eq. 13 and 14) if advantages differ by segment.

    With s_i = exp(mean over the model tokens of trajectory i of new - old log-prob), L = -(1 / trajectories) * sum_i
    v_i * mean_t min(s_i A_it, clip(s_i, 1 - clip_low, 1 + clip_high) A_it), v_i the trajectory weight. Where the
    unclipped term is the smaller one, the gradient is -(1 / trajectories) * v_i A_it s_i / |o_i| * grad logprob_t.
    Trajectories that failed tool calls have cost count among the trajectories, as in `leaf_weights`. The mean is always
    over sequences: `loss_aggregation` has no effect.
    """

    clip_low: float
    """Lower bound of the ratio, as its distance to 1."""
    clip_high: float
    """Upper bound of the ratio, as its distance to 1."""

    def value(self, batch: LossBatch) -> BatchValue:
        """Return the loss and the coefficient of every token."""
        shapes = [TreeShape(tree) for tree in batch.trees]
        count = max(1, sum(shape.planned for shape in shapes))
        loss, low, high = 0.0, 0, 0
        credits, ratios = list[TreeCredit](), list[Floats]()
        for number, shape in enumerate(shapes):
            own, weighed = batch.advantages[number], shape.leaf_model_tokens > 0
            weight = batch.trajectory_weights[number] * weighed / count  # a trajectory without tokens has no term
            length = np.maximum(shape.leaf_model_tokens, 1.0)
            mean = shape.sum_to_leaves(batch.logprobs[number] - batch.old_logprobs[number]) / length
            ratio = bounded_exp(mean)
            bounded = np.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
            advantage = own if own.ndim == 2 else own[:, None]
            free = ratio[:, None] * advantage <= bounded[:, None] * advantage
            terms = np.where(free, ratio[:, None], bounded[:, None]) * advantage
            means = terms[:, 0] if own.ndim == 1 else (terms * shape.on_path) @ shape.model_lengths / length
            loss -= float((weight * means).sum())
            cut = ~free.all(1) if own.ndim == 1 else (~free & shape.on_path & shape.is_model).any(1)
            low += int((cut & (ratio < bounded)).sum())
            high += int((cut & (ratio > bounded)).sum())
            scale = (weight * ratio / length)[:, None]
            credits.append(shape.coefficients(np.where(free, scale * advantage, 0.0), weight / length))
            ratios.append(ratio)
        return BatchValue(loss, credits, ratio_statistics(loss, ratios, low, high))
