"""The control arm of ARPO: the same places and draws, with a chance that does not depend on entropy."""

from dataclasses import dataclass

from arpo_megatron.algorithms.branching.base import Decision, ForkingPolicy, ForkPoint, fork, uniform_draw
from arpo_megatron.tree import BranchRecord


@dataclass(frozen=True, slots=True)
class RandomPolicy(ForkingPolicy):
    """Fork with probability `fork_rate` after every tool result: `ArpoPolicy` without entropy.

    A control arm forks as often as ARPO does, only elsewhere: set `fork_rate` to the `fork_chance` of an ARPO run
    (metrics.jsonl), the mean of P over its fork points. Budget, beam and draws are those of `ArpoPolicy` (the draw of a
    place is the same in both), so the arms differ only by the use of entropy. k tokens are sampled before a decision
    here too, so that both arms cost the same requests. dH is recorded as 0. `algorithm.entropy_weight` and
    `algorithm.threshold` are ignored.
    """

    seed: int
    fork_rate: float | None = None
    """Chance of a fork; None: `algorithm.branch_probability`, the chance of ARPO where entropy does not rise."""

    def decide(self, point: ForkPoint) -> Decision:
        """Decide by one draw per fork point."""
        chance = self.config.branch_probability if self.fork_rate is None else self.fork_rate
        draw = uniform_draw(self.seed, point.step, point.task_id, point.path)
        siblings, why = fork(point, self.config.beam_size, wanted=draw < chance, why="draw")
        return Decision(siblings, BranchRecord(dH=0.0, probability=chance, draw=draw, why=why))
