"""SeeUPO: the turns of a trajectory are updated one after the other, from the last to the first."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.algorithms.base import BatchValue, LossBatch
from arpo_megatron.algorithms.credit import TreeCredit, TreeShape
from arpo_megatron.algorithms.importance import bounded_exp
from arpo_megatron.algorithms.losses.batch_tokens import ratio_statistics
from arpo_megatron.algorithms.turns import turns
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class SeeUpo:
    """L_k = -sum_i w_i n_ik min(s_ik A', clip(s_ik, 1 - clip_low, 1 + clip_high) A') with A' = A_is prod_{j>k} s_ij.

    SeeUPO (arXiv 2602.06554): a step makes one update per turn, from the last turn of each trajectory (k = K_i) to the
    first. s_ik = exp(mean over the n_ik tokens of turn k of new - old log-prob) is the ratio of a whole turn. Later
    turns have been updated already; the product of their ratios corrects the advantage of turn k for that (sequential
    updates of HAPPO, arXiv 2109.11251). Trajectories of different length are aligned at their ends.
    Experimental: the order comes from the paper's abstract, the correction from HAPPO, and the geometric mean is that
    of GSPO. In the tree this is the order from the leaves to the root; a shared turn is updated once for each distance
    to the end that it has. `algorithm.minibatches` counts groups of trees, each of which gets its updates in turn, and
    a decaying learning rate (`optimizer.schedule`) counts updates.
    """

    turn_by_turn: ClassVar[bool] = True
    clip_low: float
    """Lower bound of the ratio, as its distance to 1."""
    clip_high: float
    """Upper bound of the ratio, as its distance to 1."""

    def value(self, batch: LossBatch) -> BatchValue:
        """Return the loss of the turn in training, and the coefficient of every token."""
        loss, low, high = 0.0, 0, 0
        credits, ratios = list[TreeCredit](), list[Floats]()
        for number, tree in enumerate(batch.trees):
            shape, own = TreeShape(tree), batch.advantages[number]
            sums = shape.sum_of_segments(np.nan_to_num(batch.logprobs[number] - batch.old_logprobs[number]))
            coefficients, covered = np.zeros(shape.on_path.shape), np.zeros(shape.on_path.shape, bool)
            found = []
            for row, leaf in enumerate(shape.leaves):
                path = turns(tree, int(leaf))
                if len(path) <= batch.turn:
                    continue
                means = [float(sums[list(turn.segments)].sum()) / turn.tokens for turn in path]
                place = len(path) - 1 - batch.turn
                segments = list(path[place].segments)
                ratio, later = bounded_exp(means[place]), bounded_exp(sum(means[place + 1 :]))
                advantages = later * (own[row, segments] if own.ndim == 2 else np.full(len(segments), own[row]))
                bounded = np.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
                free = ratio * advantages <= bounded * advantages
                terms = np.where(free, ratio, bounded) * advantages
                loss -= float(batch.weights[number][row] * (terms * shape.model_lengths[segments]).sum())
                # A segment's tokens share the gradient of the turn's ratio: that of the whole turn is spread evenly.
                slope = float((np.where(free, ratio * advantages, 0.0) * shape.model_lengths[segments]).sum())
                coefficients[row, segments] = batch.weights[number][row] * slope / path[place].tokens
                covered[row, segments] = True
                low, high = low + bool(~free.all() and ratio < bounded), high + bool(~free.all() and ratio > bounded)
                found.append(float(ratio))
            credits.append(_credit(shape, coefficients, covered, batch.weights[number]))
            ratios.append(np.array(found))
        return BatchValue(loss, credits, ratio_statistics(loss, ratios, low, high))


def _credit(shape: TreeShape, coefficients: Floats, covered: NDArray[np.bool_], weights: Floats) -> TreeCredit:
    """Return the credit of tokens in the turns that are updated; others have none."""
    credit = shape.coefficients(coefficients, weights)
    weight = shape.spread((covered * weights[:, None]).sum(0)).astype(np.float32)
    return TreeCredit(credit.positive, credit.negative, weight)
