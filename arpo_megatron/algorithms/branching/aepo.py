"""Entropy-balanced growing (AEPO, arXiv 2510.14545): a budget from a probe, and a price of forking again and again."""

import math
from dataclasses import dataclass

from arpo_megatron.algorithms.branching.base import Decision, ForkingPolicy, ForkPoint, Probe, fork, uniform_draw
from arpo_megatron.algorithms.branching.measure import entropy_rise, extrapolated
from arpo_megatron.tree import BranchRecord


@dataclass(frozen=True, slots=True)
class AepoPolicy(ForkingPolicy):
    """N from the entropies of a first trajectory, and forks that cost chance where the path has just forked.

        N  = round(M * sigmoid(probe_slope * (H_root - mean H_tool))), at least 2
        dH = H(after the tool result) - H_root
        P  = clip((alpha + beta * dH) * (1 - streak_penalty * l), 0, 1)

    AEPO (arXiv 2510.14545, Dynamic Entropy-Balanced Rollout). H is the sum of k entropies over log V, as in
    `ArpoPolicy`; l counts the fork points of this path, up to this one, that have all forked. The probe is one of the N
    trajectories and does not fork. The paper's penalty grows with l; its linear form here and both numbers are those of
    the released code, which rounds N up and counts l for a prompt, in rounds (here: for a path, as the paper says).
    `algorithm.initial_rollouts` and `algorithm.threshold` are ignored.

    Attributes:
        config: M, Z, alpha, beta, k.
        vocabulary_size: V.
        seed: the run's seed.
        probe_slope: of the sigmoid.
        streak_penalty: share of the chance that a fork costs the next one.
    """

    vocabulary_size: int
    seed: int
    probe_slope: float = 0.5
    streak_penalty: float = 0.05

    def plan(self, probe: Probe) -> int:
        """N; half of M where the probe has called no tool."""
        k, scale = self.config.entropy_tokens, math.log(self.vocabulary_size)
        root = extrapolated(probe.start_entropies, k) / scale
        tools = [extrapolated(entropies, k) / scale for entropies in probe.tool_entropies] or [root]
        share = (
            1 + math.tanh(self.probe_slope * (root - sum(tools) / len(tools)) / 2)
        ) / 2  # the sigmoid, without overflow
        return min(self.config.group_size, max(2, round(self.config.group_size * share)))

    @property
    def measured_tokens(self) -> int:
        """k; 0 where no fork is possible."""
        return self.config.entropy_tokens if self.config.beam_size > 1 and self.config.group_size > 2 else 0

    def decide(self, point: ForkPoint) -> Decision:
        """One draw for a fork point."""
        rise = entropy_rise(point, self.config.entropy_tokens, self.vocabulary_size)
        chance = self.config.branch_probability + self.config.entropy_weight * rise
        chance = min(1.0, max(0.0, chance * max(0.0, 1 - self.streak_penalty * point.streak)))
        draw = uniform_draw(self.seed, point.step, point.task_id, point.path)
        siblings, why = fork(point, self.config.beam_size, wanted=draw < chance, why="draw")
        return Decision(siblings, BranchRecord(dH=rise, probability=chance, draw=draw, why=why))
