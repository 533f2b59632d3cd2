"""Returns discounted by turn: the outcome counts more for late turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from arpo_megatron.algorithms.advantages.group import finite
from arpo_megatron.algorithms.base import Group
from arpo_megatron.algorithms.turns import Turn, by_turns
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class ChunkReturn:
    """A_is = chunk_discount^(K_i - k) * r_i for the k-th of K_i chunks (IPA of ROME, arXiv 2512.24873, eq. 7).
    Experimental: the formula comes from public notes on the paper.

    A chunk reaches from one interaction with the environment to the next, so it is a turn of the tree. There is no
    baseline: failures must earn less than 0 to be trained against, as a broken format does here. The equation is taken
    from public notes on the paper, which give no discount; 0.95 is that of a public training run.
    """

    chunk_discount: Annotated[float, Field(gt=0, le=1)] = 0.95
    """gamma."""

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Return float64[leaves, segments] per group."""
        return [by_turns(group.tree, finite(group.rewards), self._returns) for group in groups]

    def _returns(self, reward: float, path: Sequence[Turn]) -> list[float]:
        return [self.chunk_discount**remaining * reward for remaining in reversed(range(len(path)))]
