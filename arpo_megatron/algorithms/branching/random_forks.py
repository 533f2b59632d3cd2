"""The control arm of ARPO: the same places and draws, with a chance that does not depend on entropy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from arpo_megatron.algorithms.branching.arpo import fork_probability
from arpo_megatron.algorithms.branching.base import Decision, ForkingPolicy, ForkPoint, fork, uniform_draw
from arpo_megatron.algorithms.branching.measure import entropy_rise
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.tree import BranchRecord, RolloutTree

NAME = "random"
"""Name of the policy in configs."""
MATCHED = "matched"
"""Value of `fork_rate` for the rate of ARPO."""


@dataclass(frozen=True, slots=True)
class RandomPolicy(ForkingPolicy):
    """Fork with probability `fork_rate` after every tool result: `ArpoPolicy` without entropy.

    A control arm forks as often as ARPO does, only elsewhere. With `matched` the trainer sets the chance of a step to
    the mean chance that `ArpoPolicy`, with the same settings, would have had at the fork points of the step before
    (metric `arpo_fork_chance`); the first step has `algorithm.branch_probability`. A number is the rate of another run:
    the mean of the `fork_chance` of an ARPO run. Budget, beam and draws are those of `ArpoPolicy` (the draw of a place
    is the same in both), so the arms differ only by the use of entropy. k tokens are sampled before a decision here
    too, so that both arms cost the same requests. dH is recorded, but not used.
    """

    vocabulary_size: int
    """V."""
    seed: int
    fork_rate: Annotated[float, Field(ge=0, le=1)] | Literal["matched"] = "matched"
    """Chance of a fork; `matched`: that of ARPO at the fork points of the step before."""

    def decide(self, point: ForkPoint) -> Decision:
        """Decide by one draw per fork point."""
        chance = self.config.branch_probability if self.fork_rate == MATCHED else float(self.fork_rate)
        rise = entropy_rise(point, self.config.entropy_tokens, self.vocabulary_size)
        draw = uniform_draw(self.seed, point.step, point.task_id, point.path)
        siblings, why = fork(point, self.config.beam_size, wanted=draw < chance, why="draw")
        return Decision(siblings, BranchRecord(dH=rise, probability=chance, draw=draw, why=why))


def follows_arpo(config: AlgorithmConfig) -> bool:
    """Return whether the fork rate of a job is matched to that of ARPO."""
    return config.branching == NAME and config.params.get("fork_rate", MATCHED) == MATCHED


def at_rate(config: AlgorithmConfig, rate: float | None) -> AlgorithmConfig:
    """Return the settings of trees that fork at `rate`; unchanged if the job's rate is fixed or `rate` is None."""
    if rate is None or not follows_arpo(config):
        return config
    return replace(config, params={**config.params, "fork_rate": rate})


def rate_of_step(chances: Sequence[float | None], step: int) -> float | None:
    """Return the fork rate of the trees that step `step` (from 0) starts; None before any fork point was measured.

    Args:
        chances: `arpo_chance` of each finished step.
        step: rollout step.
    """
    return next((chance for chance in reversed(chances[:step]) if chance is not None), None)


def arpo_chance(trees: Sequence[RolloutTree], config: AlgorithmConfig) -> float | None:
    """Return the mean chance that ARPO would have had at the measured fork points of `trees`; None without any.

    With a threshold the chance at a point is 1 if ARPO would have forked there, else 0.
    """
    rises = [segment.branch.dH for tree in trees for segment in tree.segments if segment.branch is not None]
    chances = [fork_probability(config, rise) for rise in rises]
    if config.threshold is not None:
        chances = [float(chance > config.threshold) for chance in chances]
    return sum(chances) / len(chances) if chances else None
