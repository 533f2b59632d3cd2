"""XRPO's advantage: a right answer counts more if the policy found it unlikely."""

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
    """A_i + min(max(novelty_gain * (1 - eta_i), 0), novelty_limit * A_i) if A_i > 0, else A_i; A_i that of `group`.
    Experimental: the formula comes from public notes on the paper.

    eta_i = exp(s_i - mean(s)), with s_i the mean sampling log-prob of trajectory i's model tokens and the mean over the
    group (XRPO, arXiv 2510.06672, novelty-guided advantage sharpening). The formula and both numbers come from public
    reviews and code, which give no equation number. The paper sharpens right answers; here those better than the group.
    A trajectory with unknown log-probs is neither sharpened nor part of the mean. The paper's rollout allocation and
    in-prompt examples are not implemented.
    """

    novelty_gain: Positive = 2.5
    """lambda."""
    novelty_limit: Positive = 0.5
    """kappa, largest gain as a share of A_i."""

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Return float64[leaves] per group."""
        found = []
        for group in groups:
            advantages = group_advantages(group.rewards, group.tree)
            scores = np.array([_mean_logprob(group.tree, leaf) for leaf in group.tree.leaves()])
            known = ~np.isnan(scores)
            centre = scores[known].mean() if known.any() else 0.0
            # Above 1 nothing is added, so eta is limited to 1.
            eta = np.where(known, np.exp(np.minimum(np.nan_to_num(scores) - centre, 0.0)), 1.0)
            gain = np.minimum(self.novelty_gain * (1 - eta), self.novelty_limit * advantages)
            found.append(np.where(advantages > 0, advantages + gain, advantages))
        return found


def _mean_logprob(tree: RolloutTree, leaf: int) -> float:
    """Mean over the MODEL tokens of a trajectory; NaN if one is unknown or there are none."""
    path = [tree.segments[index] for index in tree.path(leaf)]
    logprobs = [segment.logprobs for segment in path if segment.role is Role.MODEL and len(segment)]
    known = [values for values in logprobs if values is not None]
    if not known or len(known) < len(logprobs):
        return float("nan")
    return float(np.concatenate(known).mean(dtype=np.float64))
