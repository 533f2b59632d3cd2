"""Entropy-driven forks after tool results (ARPO, arXiv 2507.19849, section 3.1)."""

from dataclasses import dataclass

from arpo_megatron.algorithms.branching.base import Decision, ForkingPolicy, ForkPoint, fork, uniform_draw
from arpo_megatron.algorithms.branching.measure import entropy_rise
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.tree import BranchRecord


@dataclass(frozen=True, slots=True)
class ArpoPolicy(ForkingPolicy):
    """Fork if the entropy after a tool result is higher than at the start of the trajectory.

        dH = (sum of the first k entropies after the result - sum of the first k of the trajectory) / log V
        P  = clip(alpha + beta * dH, 0, 1)

    ARPO (arXiv 2507.19849, eq. 4 and 5). The paper divides by V and forks if P exceeds tau, which is
    `algorithm.threshold`. Without a threshold P is compared with a draw, as in the released code. The scale, a sum over
    k tokens divided by log V, is also that of the released code, for which its alpha and beta were chosen. If one side
    has fewer than k tokens, k times its mean replaces its sum. Unlike the released code, the entropy is exact, is
    measured after the result instead of before the call, and is compared with the trajectory's own start.
    """

    vocabulary_size: int
    """V."""
    seed: int

    def decide(self, point: ForkPoint) -> Decision:
        """Decide by one draw per fork point; a fork fills the beam as far as the budget allows."""
        rise = entropy_rise(point, self.config.entropy_tokens, self.vocabulary_size)
        chance = fork_probability(self.config, rise)
        draw = uniform_draw(self.seed, point.step, point.task_id, point.path)
        if self.config.threshold is None:
            wanted, why = draw < chance, "draw"
        else:
            wanted, why = chance > self.config.threshold, "threshold"
        siblings, why = fork(point, self.config.beam_size, wanted=wanted, why=why)
        return Decision(siblings, BranchRecord(dH=rise, probability=chance, draw=draw, why=why))


def fork_probability(config: AlgorithmConfig, rise: float) -> float:
    """Return P of a fork point with dH = `rise`."""
    return min(1.0, max(0.0, config.branch_probability + config.entropy_weight * rise))
