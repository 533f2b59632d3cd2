"""Credit: the coefficients of each token of a tree in the loss, with shared tokens counted once.

A token shared by several trajectories has one probability ratio r. PPO's clipped objective summed over those
trajectories (leaf i with advantage A_i and weight w_i) needs two coefficients per token,

    positive = sum_i w_i max(A_i, 0)        negative = sum_i w_i min(A_i, 0)

and weight = sum_i w_i for the KL penalty and the entropy bonus,
so training the tree gives exactly the loss and the gradient of training every flattened copy. The sums run over the
leaves below a token. An advantage may differ between segments (A_is) and may carry a factor per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from arpo_megatron.algorithms.types import Floats
from arpo_megatron.tree import Float32Array, Role, RolloutTree

Aggregation = Literal["token-mean", "sequence-mean"]
SharedAdvantage = Literal["soft", "hard"]
LossForm = Literal["policy", "linear", "nll"]
"""How an update reads credits. `policy`: with the algorithm's `TokenLoss`. `linear`: as coefficients c of -sum(c *
logprob), plus the algorithm's penalty and bonus. `nll`: as coefficients alone, at temperature 1 because demonstrations
were not sampled."""


@dataclass(frozen=True, slots=True)
class TreeCredit:
    """Per-token sums over the leaves below, float32[tree.unique_tokens] each, in segment-index order; 0 outside MODEL
    tokens.
    """

    positive: Float32Array
    """Sum of w_i max(A_i, 0)."""
    negative: Float32Array
    """Sum of w_i min(A_i, 0)."""
    weight: Float32Array
    """Sum of w_i."""


def tree_credits(
    trees: Sequence[RolloutTree],
    advantages: Sequence[ArrayLike],
    *,
    aggregation: Aggregation,
    shared_advantage: SharedAdvantage = "soft",
    trajectory_weights: Sequence[ArrayLike] | None = None,
    token_factors: Sequence[ArrayLike] | None = None,
) -> list[TreeCredit]:
    """Compute the credit of every token of one batch.

    Args:
        trees: all trees of the batch; the weights w_i are global over them.
        advantages: for each tree float[leaves], in the order of `tree.leaves()`, or float[leaves, segments].
        aggregation: "token-mean": w_i = 1 / (model tokens of all trajectories, flattened). "sequence-mean": w_i = 1 /
            (trajectories * model tokens of trajectory i).
        shared_advantage: "soft": each leaf keeps its own advantage on shared tokens, as in the flattened loss. "hard":
            a shared token gets the mean advantage of the leaves below it (ARPO, arXiv 2507.19849, section 3.2: soft is
            eq. 6 and 7, hard has no number).
        trajectory_weights: for each tree float[leaves], factors of the w_i (importance weights); None: 1.
        token_factors: for each tree float[tokens], factors of all advantages at a token; None: 1. A negative factor
            swaps the signs.

    Raises:
        ValueError: the number of advantages differs from that of trees, leaves or segments.
    """
    shapes = [TreeShape(tree) for tree in trees]
    arrays = check_advantages(shapes, advantages)
    weights = leaf_weights(shapes, aggregation, trajectory_weights)
    factors: Sequence[ArrayLike | None] = token_factors or [None] * len(shapes)
    return [
        shape.token_credit(shape.apply_shared_advantage(values, shared_advantage), weight, factor)
        for shape, values, weight, factor in zip(shapes, arrays, weights, factors, strict=True)
    ]


def scale_credits(credits: Sequence[TreeCredit], factors: Sequence[Floats]) -> list[TreeCredit]:
    """Multiply all coefficients of each token by a factor, for each tree float64[tokens] in segment-index order."""
    return [
        _credit(own.positive * factor, own.negative * factor, own.weight * factor)
        for own, factor in zip(credits, factors, strict=True)
    ]


def supervised_credit(trees: Sequence[RolloutTree]) -> list[TreeCredit]:
    """Return credit for supervised training: every leaf has advantage 1, token-mean.

    `positive` equals `weight`, the weights of all flattened model tokens sum to 1, and `negative` is 0.
    """
    return tree_credits(trees, [np.ones(len(tree.leaves())) for tree in trees], aggregation="token-mean")


def check_advantages(shapes: "Sequence[TreeShape]", advantages: Sequence[ArrayLike]) -> list[Floats]:
    """Return the advantages as arrays. Raises ValueError if their shapes do not fit the trees."""
    arrays = [np.asarray(values, np.float64) for values in advantages]
    expected = [shape.on_path.shape for shape in shapes]
    fits = len(arrays) == len(expected) and all(
        values.shape in (size[:1], size) for values, size in zip(arrays, expected, strict=True)
    )
    if not fits:
        raise ValueError(
            f"advantages of shapes {[values.shape for values in arrays]} for trees with {expected} leaves and segments"
        )
    return arrays


def leaf_weights(
    shapes: "Sequence[TreeShape]", aggregation: Aggregation, factors: Sequence[ArrayLike] | None = None
) -> list[Floats]:
    """Return w_i of every leaf of every tree. A trajectory without model tokens has weight 0 but counts as a
    trajectory, and so does one that was lost to a failed tool call, with the mean length of the others.
    """
    lengths = [shape.leaf_model_tokens for shape in shapes]
    if aggregation == "token-mean":
        total = sum(float(n.sum()) * shape.planned / len(n) for n, shape in zip(lengths, shapes, strict=True))
        weights = [np.full(len(tokens), 1.0 / max(total, 1.0)) for tokens in lengths]
    else:
        trajectories = sum(shape.planned for shape in shapes)
        weights = [np.where(n > 0, 1.0 / (trajectories * np.maximum(n, 1.0)), 0.0) for n in lengths]
    if factors is None:
        return weights
    return [w * np.asarray(own, np.float64) for w, own in zip(weights, factors, strict=True)]


class TreeShape:
    """Parents, lengths and leaves of a tree as arrays, for sums along its paths."""

    def __init__(self, tree: RolloutTree) -> None:
        segments = tree.segments
        self.lengths = np.array([len(segment) for segment in segments])
        """int[segments], tokens."""
        self.is_model = np.array([segment.role is Role.MODEL for segment in segments])
        """bool[segments]."""
        self.leaves = np.array(tree.leaves())
        """int[leaves], segment indices."""
        self.planned = tree.planned
        """Number of its trajectories and of those that failed tool calls have cost."""
        self.on_path = np.zeros((len(self.leaves), len(segments)), bool)
        """bool[leaves, segments], whether a segment is on the leaf's path."""
        for number, leaf in enumerate(self.leaves):
            self.on_path[number, tree.path(int(leaf))] = True
        self.model_lengths = np.where(self.is_model, self.lengths, 0).astype(np.float64)
        """float64[segments], MODEL tokens."""
        self.leaf_model_tokens: Floats = self.on_path @ self.model_lengths
        """float64[leaves], MODEL tokens of each trajectory."""

    def apply_shared_advantage(self, advantages: Floats, shared_advantage: SharedAdvantage) -> Floats:
        """Return the advantages that count at each segment.

        Returns:
            soft: the advantages unchanged. hard: float64[leaves, segments], the mean over the leaves below a segment.
        """
        if shared_advantage == "soft":
            return advantages
        by_segment = np.where(self.on_path, advantages if advantages.ndim == 2 else advantages[:, None], 0.0)
        means = by_segment.sum(0) / np.maximum(1, self.on_path.sum(0))
        return np.where(self.on_path, means, 0.0)

    def token_credit(self, advantages: Floats, weights: Floats, factor: ArrayLike | None = None) -> TreeCredit:
        """Sum the leaves' weights and weighted advantages over the leaves below each token."""
        by_segment = advantages if advantages.ndim == 2 else advantages[:, None]
        positive = self.spread(self.sum_below(weights[:, None] * np.maximum(by_segment, 0.0)))
        negative = self.spread(self.sum_below(weights[:, None] * np.minimum(by_segment, 0.0)))
        if factor is not None:
            scale = np.nan_to_num(np.asarray(factor, np.float64))  # NaN outside MODEL tokens
            up, down = np.maximum(scale, 0.0), np.minimum(scale, 0.0)
            positive, negative = positive * up + negative * down, negative * up + positive * down
        return _credit(positive, negative, self.spread(self.sum_below(weights[:, None])))

    def coefficients(self, values: Floats, weights: Floats) -> TreeCredit:
        """Return credit whose token values are sums of the leaves' values below them, positive and negative values
        apart.

        Args:
            values: float64[leaves] or [leaves, segments].
            weights: float64[leaves].
        """
        by_segment = values if values.ndim == 2 else values[:, None]
        positive = self.spread(self.sum_below(np.maximum(by_segment, 0.0)))
        negative = self.spread(self.sum_below(np.minimum(by_segment, 0.0)))
        return _credit(positive, negative, self.spread(self.sum_below(weights[:, None])))

    def sum_to_leaves(self, token_values: Floats) -> Floats:
        """Sum token values over the MODEL tokens of each trajectory; float64[leaves]."""
        return np.asarray(self.on_path @ np.where(self.is_model, self.sum_of_segments(token_values), 0.0))

    def sum_of_segments(self, token_values: Floats) -> Floats:
        """Sum token values over each segment; float64[segments]."""
        owners = np.repeat(np.arange(len(self.lengths)), self.lengths)
        sums = np.bincount(owners, np.asarray(token_values, np.float64), minlength=len(self.lengths))
        return sums.astype(np.float64)

    def sum_below(self, leaf_values: Floats) -> Floats:
        """Sum values over the leaves at or below each segment; `leaf_values` is [leaves, 1] or [leaves, segments]."""
        return np.asarray(np.where(self.on_path, leaf_values, 0.0).sum(0))

    @property
    def copies(self) -> Floats:
        """float64[tokens], the number of trajectories that hold a token; 0 outside MODEL segments."""
        return self.spread(self.on_path.sum(0).astype(np.float64))

    def spread(self, segment_values: Floats) -> Floats:
        """Repeat the value of each segment for its tokens; 0 outside MODEL segments."""
        values: Floats = np.where(self.is_model, segment_values, 0.0).astype(np.float64)
        return values.repeat(self.lengths)


def _credit(positive: Floats, negative: Floats, weight: Floats) -> TreeCredit:
    return TreeCredit(positive.astype(np.float32), negative.astype(np.float32), weight.astype(np.float32))
