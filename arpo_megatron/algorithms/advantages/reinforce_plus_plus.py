"""REINFORCE++: rewards are whitened over all tokens of the step instead of within each group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arpo_megatron.algorithms.advantages.group import finite
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.credit import TreeShape
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus:
    """A_i = (R_i - mean) / sqrt(var + 1e-8), both over the model tokens of all trajectories of the step.

    REINFORCE++ (arXiv 2501.03262, Global Advantage Normalization). The return of a token is the reward of its
    trajectory, because the discount is 1 as in the paper's experiments. So there is one return per trajectory, and the
    mean over tokens weighs trajectory i by its |o_i| model tokens, with shared tokens counted once per trajectory. The
    variance is unbiased. The paper subtracts the KL penalty from the reward; here it is `algorithm.kl_coefficient`, in
    the loss.
    """

    group_baseline: bool = False
    """R_i = r_i - mean of the group (the variant with baseline); False: R_i = r_i."""

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Return float64[leaves] per group; zeros if all returns of the step are equal."""
        returns = [finite(group.rewards) for group in groups]
        if self.group_baseline:
            # Equal rewards give exact zeros; rounding errors would otherwise be divided by their own variance.
            returns = [np.zeros_like(r) if len(r) and np.ptp(r) == 0.0 else r - r.mean() for r in returns]
        every = np.concatenate([np.zeros(0), *returns])
        counts = np.concatenate([np.zeros(0), *(TreeShape(group.tree).leaf_model_tokens for group in groups)])
        total = counts.sum()
        if total < 2 or np.ptp(every[counts > 0]) == 0.0:
            return [np.zeros_like(values) for values in returns]
        mean = (counts * every).sum() / total
        variance = (counts * (every - mean) ** 2).sum() / (total - 1)
        return [(values - mean) / np.sqrt(variance + 1e-8) for values in returns]
