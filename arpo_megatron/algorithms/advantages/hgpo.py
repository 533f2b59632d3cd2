"""A hierarchy of groups: a turn is compared with turns after the same state, more so if they share its history."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.advantages.group import finite, without_signal
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.turns import turns
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class HierarchyOfGroups:
    """A_is = sum_k w_k A_k / sum_k w_k with w_k = (k + 1)^hgpo_weight (HGPO, arXiv 2602.22817, eq. 3 to 7).

    The k-group of a turn holds all turns of the tree's trajectories whose last k + 1 states equal its own, k = 0 to
    `hgpo_history`. A_k = (R - mean(R)) / (std(R) + 1e-6) over that group, with the biased std and R =
    hgpo_discount^(remaining turns) * r. A state is the text of the environment before the turn (prompt, tool result),
    compared by its tokens. So turns after one fork point share all their groups, and turns of other branches join if
    the tools gave the same answer. A shared turn is a member once per trajectory. Groups without spread do not count,
    as in the authors' code, which uses (k + 2)^alpha for the paper's (k + 1)^alpha. The paper's policy sees only the
    last K states; here it sees all of them.
    """

    hgpo_history: Annotated[int, Field(ge=0)] = 2
    """K, number of earlier states that are compared."""
    hgpo_weight: Annotated[float, Field(ge=0)] = 1.0
    """alpha; 0: equal weights for all groups."""
    hgpo_discount: Annotated[float, Field(gt=0, le=1)] = 0.95
    """gamma, per turn."""

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Return float64[leaves, segments] per group."""
        return [self._tree(group) for group in groups]

    def _tree(self, group: Group) -> Floats:
        rewards, leaves = finite(group.rewards), group.tree.leaves()
        paths = [turns(group.tree, leaf) for leaf in leaves]
        returns = [r * self.hgpo_discount ** np.arange(len(p))[::-1] for p, r in zip(paths, rewards, strict=True)]
        members = defaultdict[tuple[bytes, ...], list[tuple[int, int]]](list)
        for row, path in enumerate(paths):
            states = [turn.state for turn in path]
            for number in range(len(path)):
                for back in range(min(self.hgpo_history, number) + 1):
                    members[tuple(states[number - back : number + 1])].append((row, number))
        sums = [np.zeros((2, len(path))) for path in paths]  # weighted advantages, weights
        for states_seen, places in members.items():
            values = np.array([returns[row][number] for row, number in places])
            if without_signal(values):
                continue
            weight = len(states_seen) ** self.hgpo_weight
            for (row, number), value in zip(places, (values - values.mean()) / (values.std() + 1e-6), strict=True):
                sums[row][:, number] += weight * value, weight
        advantages = np.zeros((len(leaves), len(group.tree.segments)))
        for row, path in enumerate(paths):
            for turn, (total, weight) in zip(path, sums[row].T, strict=True):
                advantages[row, list(turn.segments)] = total / weight if weight else 0.0
        return advantages
