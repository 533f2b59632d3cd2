"""The arithmetic of AEPO's released code (github RUC-NLPIR/ARPO, AEPO), defects included, for comparison."""

import math
from dataclasses import dataclass

from arpo_megatron.algorithms.branching.arpo_reference import released_sum
from arpo_megatron.algorithms.branching.base import Decision, ForkingPolicy, ForkPoint, fork, uniform_draw
from arpo_megatron.tree import BranchRecord


@dataclass(frozen=True, slots=True)
class AepoReferencePolicy(ForkingPolicy):
    """Fork when clip((u + w * dH) * (1 - 0.05 * l), 0, 1) >= p, with a uniform draw u, p = alpha and w = beta.

    The released code of AEPO (arXiv 2510.14545). dH is that of `ArpoReferencePolicy`, of the segment that MADE THE
    CALL. Repeated are that and the number N of first trajectories from the config (both released scripts have the probe
    switched off). Not repeated, besides what `ArpoReferencePolicy` does not repeat: l counted for a prompt in rounds
    (here: for a path).

    Attributes:
        config: M, N, Z, alpha, beta.
        vocabulary_size: V.
        seed: the run's seed.
        streak_penalty: 0.05 in the released code.
    """

    vocabulary_size: int
    seed: int
    streak_penalty: float = 0.05

    def decide(self, point: ForkPoint) -> Decision:
        """One draw for a fork point; the recorded draw is 1 - u, so that a fork is again one below the chance."""
        rise = released_sum(point.before_entropies) - released_sum(point.start_entropies)
        rise /= math.log(self.vocabulary_size)
        limit, weight = self.config.branch_probability, self.config.entropy_weight
        price = max(0.0, 1 - self.streak_penalty * point.streak)
        draw = uniform_draw(self.seed, point.step, point.task_id, point.path)
        wanted = min(1.0, max(0.0, (1 - draw + weight * rise) * price)) >= limit
        chance = 1 + weight * rise - limit / price if price > 0 else float(limit <= 0)
        siblings, why = fork(point, self.config.beam_size, wanted=wanted, why="draw")
        return Decision(siblings, BranchRecord(dH=rise, probability=min(1.0, max(0.0, chance)), draw=draw, why=why))
