"""Independent trajectories: the control arm, and every evaluation."""

from dataclasses import dataclass

from arpo_megatron.algorithms.branching.base import Decision, ForkPoint
from arpo_megatron.tree import BranchRecord


@dataclass(frozen=True, slots=True)
class GrpoPolicy:
    """`group_size` trajectories from the prompt and no forks (GRPO, arXiv 2402.03300, expectation in eq. 3)."""

    group_size: int

    @property
    def initial(self) -> int:
        """Return `group_size`: every trajectory starts at the prompt."""
        return self.group_size

    @property
    def total(self) -> int:
        """Return `group_size`: forks add no trajectories."""
        return self.group_size

    @property
    def measured_tokens(self) -> int:
        """Return 0: no entropy is measured, because no path forks."""
        return 0

    def decide(self, point: ForkPoint) -> Decision:
        """Return a decision against any fork."""
        return Decision(0, BranchRecord(dH=0.0, probability=0.0, draw=0.0, why="grpo"))
