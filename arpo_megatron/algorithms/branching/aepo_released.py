"""The rule of AEPO's released code (github RUC-NLPIR/ARPO, AEPO), its rounds, and some of its defects."""

import math
from dataclasses import dataclass
from typing import ClassVar

from arpo_megatron.algorithms.branching.arpo_released import draw_copies, released_entropy
from arpo_megatron.algorithms.branching.base import Decision, ForkingPolicy, ForkPoint, Probe, fork
from arpo_megatron.tree import BranchRecord


@dataclass(frozen=True, slots=True)
class AepoScriptsPolicy(ForkingPolicy):
    """Fork when clip((u + w * dH) * (1 - 0.05 * l), 0, 1) >= p, with a uniform draw u, p = alpha and w = beta.

    The released code of AEPO (arXiv 2510.14545) as both of its scripts run it: they switch the probe off, so N is
    `algorithm.initial_rollouts`. l is the number of latest rounds in which the task got a new path, top-up included.
    Reproduced and not reproduced is what `ArpoReleasedPolicy` lists. Not reproduced, too: l is kept in a round without
    a new path of any task of the batch (here: it falls to 0).
    """

    released_rounds: ClassVar[bool] = True
    vocabulary_size: int
    """V."""
    seed: int
    streak_penalty: float = 0.05
    """0.05 in the released code."""

    def decide(self, point: ForkPoint) -> Decision:
        """Decide by one draw per copy. The lowest 1 - u is recorded, so that a fork is a draw below the chance."""
        rise = released_entropy(point.before_entropies) - released_entropy(point.start_entropies)
        rise /= math.log(self.vocabulary_size)
        limit, weight = self.config.branch_probability, self.config.entropy_weight
        price = max(0.0, 1 - self.streak_penalty * point.streak)
        draws = draw_copies(self.seed, point, self.config.beam_size)
        wanted = [min(1.0, max(0.0, (1 - draw + weight * rise) * price)) >= limit for draw in draws]
        chance = 1 + weight * rise - limit / price if price > 0 else float(limit <= 0)
        siblings, why = fork(point, 1 + sum(wanted), wanted=any(wanted), why="draw")
        record = BranchRecord(dH=rise, probability=min(1.0, max(0.0, chance)), draw=min(draws), why=why)
        return Decision(siblings, record)


@dataclass(frozen=True, slots=True)
class AepoReleasedPolicy(AepoScriptsPolicy):
    """Set N by a probe, and then fork like `AepoScriptsPolicy`.

        N = int(M * sigmoid(0.5 * (H_root - mean H))) + 1, from 2 to M, with the mean over all segments of the probe

    The released code of AEPO (arXiv 2510.14545) with its probe switched on. Not reproduced: a probe that is thrown away
    (here: it is one of the N and does not fork), and an H_root from another sample (here: the probe's own).
    `algorithm.initial_rollouts` is ignored.
    """

    probe_slope: float = 0.5
    """Slope of the sigmoid; 0.5 in the released code."""

    def plan(self, probe: Probe) -> int:
        """Return N, the number of first trajectories, by the entropies of the probe."""
        scale, total = math.log(self.vocabulary_size), self.config.group_size
        segments = [released_entropy(each) / scale for each in (probe.start_entropies, *probe.tool_entropies)]
        difference = segments[0] - sum(segments) / len(segments)
        share = (1 + math.tanh(self.probe_slope * difference / 2)) / 2  # the sigmoid, without overflow
        return min(total, max(2, int(total * share) + 1))
