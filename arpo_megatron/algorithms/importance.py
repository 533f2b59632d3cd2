"""Importance weights for tokens that another policy has sampled: older weights, or an engine with other arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from arpo_megatron.algorithms.credit import TreeShape
from arpo_megatron.algorithms.types import Floats
from arpo_megatron.tree import RolloutTree

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this in both directions before they are exponentiated, in the token-level losses too: an
infinite ratio that is then clipped has gradient 0 * inf."""

Correction = Literal["none", "tis", "icepop", "geometric", "product"]


def bounded_exp(log_ratios: ArrayLike) -> Floats:
    """Return exp of the log-ratios, clamped to `MAX_LOG_RATIO`."""
    ratios: Floats = np.exp(np.clip(np.asarray(log_ratios, np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return ratios


@dataclass(frozen=True, slots=True)
class SamplingWeights:
    """Importance weights of the trees of one step, and their metrics."""

    leaves: list[Floats]
    """For each tree float64[leaves], factors of w_i; all 1 for corrections of tokens."""
    tokens: list[Floats]
    """For each tree float64[tokens] in segment-index order, factors of a token's credit; all 1 for corrections of
    trajectories."""
    statistics: dict[str, float]
    """Metrics `weights_mean`, `weights_ess`, `weights_truncated` and `kl_sampling`."""


def sampling_weights(
    trees: Sequence[RolloutTree], log_ratios: Sequence[ArrayLike], correction: Correction, *, low: float, high: float
) -> SamplingWeights:
    """Compute importance weights and divide them by their mean over the batch.

    With r the probability of a token under the policy of the step over that at which it was sampled, the weight is

    - `tis`: min(r, high) of a token (truncated importance sampling)
    - `icepop`: r of a token if low <= r <= high, else 0 (IcePop, arXiv 2510.18855)
    - `geometric`: min(s, high) of a trajectory, with s the geometric mean of r over its model tokens
    - `product`: min(p, high) of a trajectory, with p the product of r over its model tokens
    - `none`: 1

    The mean counts a shared token once for each of its trajectories, so the loss and the gradient equal those of the
    flattened batch.

    Args:
        trees: all trees of the batch.
        log_ratios: for each tree float[tokens] in segment-index order, log r in nats; NaN (unknown) counts as 0.
        correction: kind of weights.
        low: smallest ratio that `icepop` keeps.
        high: largest weight; `icepop` leaves larger ratios out.
    """
    shapes = [TreeShape(tree) for tree in trees]
    ones = [np.ones(len(shape.leaves)) for shape in shapes]
    flat = [np.ones(int(shape.lengths.sum())) for shape in shapes]
    if correction == "none" or not trees:
        return SamplingWeights(ones, flat, {})
    logs = [np.nan_to_num(np.asarray(values, np.float64)) for values in log_ratios]
    copies = [shape.copies for shape in shapes]
    kl = _mean([bounded_exp(own) - 1 - own for own in logs], copies)
    if correction in ("geometric", "product"):
        sums = [shape.sum_to_leaves(own) for shape, own in zip(shapes, logs, strict=True)]
        if correction == "geometric":
            sums = [own / np.maximum(shape.leaf_model_tokens, 1.0) for shape, own in zip(shapes, sums, strict=True)]
        ratios = [bounded_exp(own) for own in sums]
        weights, statistics = _normalised(ratios, ones, -np.inf, high)
        return SamplingWeights(weights, flat, {**statistics, "kl_sampling": kl})
    ratios = [bounded_exp(own) for own in logs]
    weights, statistics = _normalised(ratios, copies, low if correction == "icepop" else -np.inf, high)
    return SamplingWeights(ones, weights, {**statistics, "kl_sampling": kl})


def _normalised(
    ratios: Sequence[Floats], copies: Sequence[Floats], low: float, high: float
) -> tuple[list[Floats], dict[str, float]]:
    """Bound the ratios and divide them by their mean; `low` above -inf masks, otherwise `high` truncates."""
    outside = [(own < low) | (own > high) for own in ratios]
    if low > -np.inf:
        weights = [np.where(out, 0.0, own) for out, own in zip(outside, ratios, strict=True)]
    else:
        weights = [np.minimum(own, high) for own in ratios]
    mean, square = _mean(weights, copies), _mean([own**2 for own in weights], copies)
    statistics = {
        "weights_mean": mean,
        "weights_ess": mean**2 / square if square else 0.0,
        "weights_truncated": _mean([out.astype(np.float64) for out in outside], copies),
    }
    return [own / mean if mean else own for own in weights], statistics


def _mean(values: Sequence[Floats], copies: Sequence[Floats]) -> float:
    total = sum(float(own.sum()) for own in copies)
    return sum(float(value @ own) for value, own in zip(values, copies, strict=True)) / total if total else 0.0
