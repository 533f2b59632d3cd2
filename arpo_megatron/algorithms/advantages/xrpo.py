"""Novelty: a right answer that the policy found unlikely counts more."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.advantages.group import group_advantages
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.types import Floats
from arpo_megatron.tree import Role, RolloutTree

Positive = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class NoveltySharpened:
    """A_i + min(max(novelty_gain * (1 - eta_i), 0), novelty_limit * A_i) where A_i > 0, else A_i; A_i that of `group`.

    eta_i = exp(s_i - mean(s)) with s_i the mean sampling log-prob of trajectory i's model tokens, the mean over the
    group (XRPO, arXiv 2510.06672, its part on novelty-guided advantage sharpening; formula and numbers as public
    reviews and code quote them, which give no equation's number). The paper sharpens right answers; here those better
    than the group. A trajectory with unknown log-probs is neither sharpened nor part of the mean. The paper's
    allocation of rollouts and examples in the prompt are no part of this.

    Attributes:
        novelty_gain: lambda.
        novelty_limit: kappa, largest gain as a share of A_i.
    """

    novelty_gain: Positive = 2.5
    novelty_limit: Positive = 0.5

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """float64[leaves] a group."""
        found = []
        for group in groups:
            advantages = group_advantages(group.rewards)
            scores = np.array([_mean_logprob(group.tree, leaf) for leaf in group.tree.leaves()])
            known = ~np.isnan(scores)
            centre = scores[known].mean() if known.any() else 0.0
            eta = np.where(
                known, np.exp(np.minimum(np.nan_to_num(scores) - centre, 0.0)), 1.0
            )  # above 1 nothing is added
            gain = np.minimum(self.novelty_gain * (1 - eta), self.novelty_limit * advantages)
            found.append(np.where(advantages > 0, advantages + gain, advantages))
        return found


def _mean_logprob(tree: RolloutTree, leaf: int) -> float:
    """Over the MODEL tokens of a trajectory; NaN where one is unknown or there are none."""
    parts = [s.logprobs for s in (tree.segments[i] for i in tree.path(leaf)) if s.role is Role.MODEL and len(s)]
    known = [values for values in parts if values is not None]
    return float(np.concatenate(known).mean(dtype=np.float64)) if known and len(known) == len(parts) else float("nan")
