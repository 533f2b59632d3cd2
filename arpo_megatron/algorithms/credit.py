"""Credit: what each token of a tree is pushed by, with shared tokens counted once.

A token shared by several trajectories has one probability ratio r. PPO's clipped objective summed over those
trajectories (leaf i with advantage A_i and weight w_i) needs only two numbers a token,

    positive = sum_i w_i max(A_i, 0)        negative = sum_i w_i min(A_i, 0)

so training the tree gives exactly the loss and the gradient of training every flattened copy. The sums run over the
leaves below a token, so they are made segment by segment from the leaves to the root.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arpo_megatron.tree import Float32Array, Role, RolloutTree

Aggregation = Literal["token-mean", "sequence-mean"]
Attribution = Literal["soft", "hard"]
Loss = Literal["ppo", "linear", "nll"]
"""What credits are to an update: of PPO-clip; coefficients c of -sum(c * logprob); the same at temperature 1, where
demonstrations were not sampled at any."""
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TreeCredit:
    """Per-token sums over the leaves below, in segment-index order (segments 0 to S-1 concatenated).

    Attributes:
        positive: float32[tree.unique_tokens], sum of w_i max(A_i, 0); 0 outside MODEL tokens, like the next two.
        negative: float32[tree.unique_tokens], sum of w_i min(A_i, 0).
        weight: float32[tree.unique_tokens], sum of w_i.
    """

    positive: Float32Array
    negative: Float32Array
    weight: Float32Array


def tree_credits(
    trees: Sequence[RolloutTree],
    advantages: Sequence[ArrayLike],
    *,
    aggregation: Aggregation,
    attribution: Attribution,
    trajectory_weights: Sequence[ArrayLike] | None = None,
) -> list[TreeCredit]:
    """Credit of every token of one minibatch.

    Args:
        trees: all trees of the minibatch; the weights w_i are global over them.
        advantages: for each tree float[leaves], in the order of `tree.leaves()`.
        aggregation: "token-mean": w_i = 1 / (model tokens of all trajectories, flattened). "sequence-mean":
            w_i = 1 / (trajectories * model tokens of trajectory i).
        attribution: "soft": each leaf keeps its own advantage on shared tokens, as in the flattened loss. "hard": a
            shared token gets the mean advantage of the leaves below it (ARPO, arXiv 2507.19849).
        trajectory_weights: for each tree float[leaves], factors of the w_i (importance weights); None: 1.

    Raises:
        ValueError: another number of advantages than trees or leaves.
    """
    shapes = [TreeShape(tree) for tree in trees]
    leaf_advantages = [np.asarray(values, np.float64) for values in advantages]
    expected = [len(shape.leaves) for shape in shapes]
    if [values.shape for values in leaf_advantages] != [(count,) for count in expected]:
        found = [values.shape for values in leaf_advantages]
        raise ValueError(f"advantages of shapes {found} for trees with {expected} leaves")
    weights = _leaf_weights([shape.leaf_model_tokens for shape in shapes], aggregation)
    if trajectory_weights is not None:
        weights = [w * np.asarray(own, np.float64) for w, own in zip(weights, trajectory_weights, strict=True)]
    return [
        shape.token_credit(values, weight, attribution)
        for shape, values, weight in zip(shapes, leaf_advantages, weights, strict=True)
    ]


def supervised_credit(trees: Sequence[RolloutTree]) -> list[TreeCredit]:
    """Credit for supervised training on the trees: every leaf has advantage 1, token-mean.

    `positive` equals `weight`, the weights of all flattened model tokens sum to 1, and `negative` is 0.
    """
    ones = [np.ones(len(tree.leaves())) for tree in trees]
    return tree_credits(trees, ones, aggregation="token-mean", attribution="soft")


def _leaf_weights(model_tokens: Sequence[_Floats], aggregation: Aggregation) -> list[_Floats]:
    """w_i of every leaf of every tree. A trajectory without model tokens weighs nothing but counts as one."""
    if aggregation == "token-mean":
        total = sum(float(tokens.sum()) for tokens in model_tokens)
        return [np.full(len(tokens), 1.0 / max(total, 1.0)) for tokens in model_tokens]
    trajectories = sum(len(tokens) for tokens in model_tokens)
    return [np.where(tokens > 0, 1.0 / (trajectories * np.maximum(tokens, 1.0)), 0.0) for tokens in model_tokens]


class TreeShape:
    """Parents, lengths and leaves of a tree as arrays, for sums along its paths."""

    def __init__(self, tree: RolloutTree) -> None:
        segments = tree.segments
        self.parents = [segment.parent for segment in segments]
        self.lengths = np.array([len(segment) for segment in segments])
        self.is_model = np.array([segment.role is Role.MODEL for segment in segments])
        self.leaves = np.array(tree.leaves())
        tokens = np.where(self.is_model, self.lengths, 0).astype(np.float64)
        for index, parent in enumerate(self.parents[1:], start=1):  # parents come before children
            tokens[index] += tokens[parent]
        self.leaf_model_tokens: _Floats = tokens[self.leaves]

    def token_credit(self, advantages: _Floats, weights: _Floats, attribution: Attribution) -> TreeCredit:
        """Sums of the leaves' weights and weighted advantages over the leaves below each token."""
        weight = self._sum_below(weights)
        if attribution == "soft":
            positive = self._sum_below(weights * np.maximum(advantages, 0.0))
            negative = self._sum_below(weights * np.minimum(advantages, 0.0))
        else:
            mean = self._sum_below(advantages) / self._sum_below(np.ones_like(advantages))
            positive = weight * np.maximum(mean, 0.0)
            negative = weight * np.minimum(mean, 0.0)
        return TreeCredit(self._spread(positive), self._spread(negative), self._spread(weight))

    def sum_to_leaves(self, token_values: _Floats) -> _Floats:
        """For every leaf the sum over the MODEL tokens of its trajectory, of values in segment-index order."""
        ends = np.cumsum(self.lengths)
        totals = np.concatenate([[0.0], np.cumsum(np.where(np.repeat(self.is_model, self.lengths), token_values, 0.0))])
        sums = totals[ends] - totals[ends - self.lengths]
        for index, parent in enumerate(self.parents[1:], start=1):  # parents come before children
            sums[index] += sums[parent]
        return np.asarray(sums[self.leaves])

    def spread_leaves(self, positive: _Floats, negative: _Floats, weight: _Floats) -> TreeCredit:
        """Credit whose token values are sums of the leaves' values below them."""
        return TreeCredit(*(self._spread(self._sum_below(values)) for values in (positive, negative, weight)))

    def _sum_below(self, leaf_values: _Floats) -> _Floats:
        """For every segment, the sum of `leaf_values` over the leaves at or below it."""
        sums = np.zeros(len(self.parents))
        sums[self.leaves] = leaf_values
        for index in range(len(self.parents) - 1, 0, -1):
            sums[self.parents[index]] += sums[index]
        return sums

    def _spread(self, segment_values: _Floats) -> Float32Array:
        """One value a token, 0 outside MODEL segments."""
        return np.repeat(np.where(self.is_model, segment_values, 0.0), self.lengths).astype(np.float32)
