"""The entropy rule of AEPO's released code (github RUC-NLPIR/ARPO, AEPO), with three of its defects."""

import math
from dataclasses import dataclass

from arpo_megatron.algorithms.branching.arpo_reference import released_entropy
from arpo_megatron.algorithms.branching.base import Decision, ForkingPolicy, ForkPoint, fork, uniform_draw
from arpo_megatron.tree import BranchRecord


@dataclass(frozen=True, slots=True)
class AepoReferencePolicy(ForkingPolicy):
    """Fork when clip((u + w * dH) * (1 - 0.05 * l), 0, 1) >= p, with a uniform draw u, p = alpha and w = beta.

    The released code of AEPO (arXiv 2510.14545). Reproduced: dH of the segment that made the call, as in
    `ArpoReferencePolicy`, and the number N of first trajectories from the config, because both released scripts switch
    the probe off. Not reproduced: what `ArpoReferencePolicy` lists, and l counted per prompt in rounds
    (here: per path).
    """

    vocabulary_size: int
    """V."""
    seed: int
    streak_penalty: float = 0.05
    """0.05 in the released code."""

    def decide(self, point: ForkPoint) -> Decision:
        """Decide by one draw per fork point. The recorded draw is 1 - u, so that a fork is again a draw below the
        chance.
        """
        rise = released_entropy(point.before_entropies) - released_entropy(point.start_entropies)
        rise /= math.log(self.vocabulary_size)
        limit, weight = self.config.branch_probability, self.config.entropy_weight
        price = max(0.0, 1 - self.streak_penalty * point.streak)
        draw = uniform_draw(self.seed, point.step, point.task_id, point.path)
        wanted = min(1.0, max(0.0, (1 - draw + weight * rise) * price)) >= limit
        chance = 1 + weight * rise - limit / price if price > 0 else float(limit <= 0)
        siblings, why = fork(point, self.config.beam_size, wanted=wanted, why="draw")
        return Decision(siblings, BranchRecord(dH=rise, probability=min(1.0, max(0.0, chance)), draw=draw, why=why))
