"""Entropy-balanced branching (AEPO, arXiv 2510.14545): N from a probe, and a penalty on consecutive forks."""

import math
from dataclasses import dataclass

from arpo_megatron.algorithms.branching.base import Decision, ForkingPolicy, ForkPoint, Probe, fork, uniform_draw
from arpo_megatron.algorithms.branching.measure import entropy_rise, extrapolate_entropy
from arpo_megatron.tree import BranchRecord


@dataclass(frozen=True, slots=True)
class AepoPolicy(ForkingPolicy):
    """Set N by the entropies of a first trajectory, and lower the chance of a fork after consecutive forks.

        N  = round(M * sigmoid(probe_slope * (H_root - mean H_tool))), at least 2
        dH = H(after the tool result) - H_root
        P  = clip((alpha + beta * dH) * (1 - streak_penalty * l), 0, 1)

    AEPO (arXiv 2510.14545, Dynamic Entropy-Balanced Rollout). H is the sum of k entropies over log V, as in
    `ArpoPolicy`; l counts the latest fork points of this path that have all forked. The probe is one of the N
    trajectories and does not fork. The paper's penalty grows with l; its linear form and both numbers are those of the
    released code. That code rounds N up and counts l per prompt in rounds; here l is per path, as in the paper.
    `algorithm.initial_rollouts` and `algorithm.threshold` are ignored.
    """

    vocabulary_size: int
    """V."""
    seed: int
    probe_slope: float = 0.5
    """Slope of the sigmoid."""
    streak_penalty: float = 0.05
    """Share of the chance that each consecutive fork costs the next one."""

    def plan(self, probe: Probe) -> int:
        """Return N; half of M if the probe has called no tool."""
        k, scale = self.config.entropy_tokens, math.log(self.vocabulary_size)
        root = extrapolate_entropy(probe.start_entropies, k) / scale
        tools = [extrapolate_entropy(entropies, k) / scale for entropies in probe.tool_entropies] or [root]
        # The sigmoid, without overflow.
        share = (1 + math.tanh(self.probe_slope * (root - sum(tools) / len(tools)) / 2)) / 2
        return min(self.config.group_size, max(2, round(self.config.group_size * share)))

    def decide(self, point: ForkPoint) -> Decision:
        """Decide by one draw per fork point."""
        rise = entropy_rise(point, self.config.entropy_tokens, self.vocabulary_size)
        chance = self.config.branch_probability + self.config.entropy_weight * rise
        chance = min(1.0, max(0.0, chance * max(0.0, 1 - self.streak_penalty * point.streak)))
        draw = uniform_draw(self.seed, point.step, point.task_id, point.path)
        siblings, why = fork(point, self.config.beam_size, wanted=draw < chance, why="draw")
        return Decision(siblings, BranchRecord(dH=rise, probability=chance, draw=draw, why=why))
