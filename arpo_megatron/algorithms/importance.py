"""Importance weights of whole trajectories that another policy has sampled."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from arpo_megatron.algorithms.credit import TreeShape
from arpo_megatron.algorithms.types import Floats
from arpo_megatron.tree import RolloutTree

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this in both directions before they are exponentiated, in the token-level losses too: an
infinite ratio that is then clipped has gradient 0 * inf."""


def bounded_exp(log_ratios: ArrayLike) -> Floats:
    """Return exp of the log-ratios, clamped to `MAX_LOG_RATIO`."""
    ratios: Floats = np.exp(np.clip(np.asarray(log_ratios, np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return ratios


def trajectory_weights(trees: Sequence[RolloutTree], log_ratios: Sequence[ArrayLike], *, limit: float) -> list[Floats]:
    """Return truncated importance weights min(limit, product of old over sampling probability) of whole trajectories.

    They correct for trajectories that an older version, or the engine's arithmetic, has sampled.

    Args:
        trees: the trees of one batch.
        log_ratios: for each tree float[tokens] in segment-index order, the log-prob under the policy of the step minus
            the one at which the token was sampled, in nats; NaN (unknown) counts as 0.
        limit: largest weight.

    Returns:
        For each tree float64[leaves].
    """
    weights = []
    for tree, values in zip(trees, log_ratios, strict=True):
        sums = TreeShape(tree).sum_to_leaves(np.nan_to_num(np.asarray(values, np.float64)))
        weights.append(np.minimum(bounded_exp(sums), limit))
    return weights
