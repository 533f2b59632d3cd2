"""Flow-GRPO's advantage: every turn of a trajectory has the same total weight, however long it is."""

from collections.abc import Sequence
from dataclasses import dataclass

from arpo_megatron.algorithms.advantages.group import group_advantages
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.turns import Turn, by_turns
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class TurnMean:
    """A_is = A_i * |o_i| / (T_i * |turn of s|), A_i the advantage of `group` (AgentFlow, arXiv 2510.05592, eq. 5 and
    7).

    With `loss_aggregation=sequence-mean` (w_i = 1 / (G |o_i|)) a token then has weight 1 / (G T_i |turn|): the mean
    over trajectories of the mean over their T_i turns of the mean over a turn's tokens. A turn is a MODEL segment with
    its continuations by newer weights; a turn without tokens does not count. AgentFlow trains only the planner of its
    four modules; here the policy writes every turn.
    """

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Return float64[leaves, segments] per group."""
        return [by_turns(group.tree, group_advantages(group.rewards, group.tree), _equal_turns) for group in groups]


def _equal_turns(advantage: float, path: Sequence[Turn]) -> list[float]:
    total = sum(turn.tokens for turn in path)
    return [advantage * total / (len(path) * turn.tokens) for turn in path]
