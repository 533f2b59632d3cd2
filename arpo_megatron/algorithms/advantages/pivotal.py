"""Pivotal credit: only the part of a trajectory after its last fork is trained, and successes are amplified."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.advantages.group import finite
from arpo_megatron.algorithms.advantages.lost import centre
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.credit import TreeShape
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class PivotalCredit:
    """A_i = r_i - mean(r), raised for good trajectories, on the segments that only trajectory i holds; 0 on others.

    R3L (arXiv 2601.03715) by its released code (`opmd_reweight_adv`, `_adjust_action_mask_for_retry`). Its retry from
    the point of failure shares a prefix with the failed attempt, and only the diverging suffixes have a gradient
    (pivotal credit). In a tree the suffix is the part that no other trajectory holds. Raised (positive amplification)
    means: A_i = 1 if r_i >= `pivotal_success`, else `pivotal_gain` * A_i if A_i > 0. So a group that is all right is
    imitated, as there.
    """

    pivotal_success: float = 1.0
    """Reward from which a trajectory counts as a success."""
    pivotal_gain: Annotated[float, Field(ge=1)] = 3.0
    """Factor of other positive advantages."""

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Return float64[leaves, segments] per group."""
        return [self._advantages(group, finite(group.rewards)) for group in groups]

    def _advantages(self, group: Group, rewards: Floats) -> Floats:
        centred = centre(group.tree, rewards)
        raised = np.where(centred > 0, self.pivotal_gain * centred, centred)
        raised = np.where(rewards >= self.pivotal_success, 1.0, raised)
        on_path = TreeShape(group.tree).on_path
        return np.where(on_path & (on_path.sum(0) == 1), raised[:, None], 0.0)
