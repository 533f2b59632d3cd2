"""The control arm of ARPO: the same places and the same draws, compared with a probability that no entropy enters."""

from dataclasses import dataclass

from arpo_megatron.algorithms.branching.base import Decision, ForkingPolicy, ForkPoint, fork, uniform_draw
from arpo_megatron.tree import BranchRecord


@dataclass(frozen=True, slots=True)
class RandomPolicy(ForkingPolicy):
    """Fork with probability alpha behind every tool result: `ArpoPolicy` with beta = 0.

    Budget, beam and draws are those of `ArpoPolicy` (a place's draw is the same in both), so whatever differs in the
    outcome is the entropy's doing. k tokens are sampled before a decision here too: the arms cost the same requests.
    dH is recorded as 0, and `algorithm.entropy_weight` and `algorithm.threshold` are ignored.

    Attributes:
        config: M, N, Z, alpha, k.
        seed: the run's seed.
    """

    seed: int

    def decide(self, point: ForkPoint) -> Decision:
        """One draw for a fork point."""
        chance = self.config.branch_probability
        draw = uniform_draw(self.seed, point.step, point.task_id, point.path)
        siblings, why = fork(point, self.config.beam_size, wanted=draw < chance, why="draw")
        return Decision(siblings, BranchRecord(dH=0.0, probability=chance, draw=draw, why=why))
