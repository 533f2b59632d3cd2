"""The arithmetic of the authors' released code (github RUC-NLPIR/ARPO, vllm_rollout_with_tools.py), defects included.

It is there so that published runs can be compared. `arpo` is the paper's rule.
"""

import math
from dataclasses import dataclass

import numpy as np

from arpo_megatron.algorithms.branching.base import Decision, ForkingPolicy, ForkPoint, fork, uniform_draw
from arpo_megatron.tree import BranchRecord, Float32Array

RELEASED_TOKENS = 20
"""First tokens of a segment whose entropy the released code sums; it has no setting for it."""


@dataclass(frozen=True, slots=True)
class ArpoReferencePolicy(ForkingPolicy):
    """Fork when clip(u - w * dH, 0, 1) <= p, with a uniform draw u, p = alpha and w = beta.

        dH = (sum of the first <= 20 entropies of the segment that MADE THE CALL - sum of those of the first segment)
             / log V

    What the released code of ARPO (arXiv 2507.19849) has in the place of its eq. 4 and 5. Defects of it that are
    repeated here:
        - the entropy is that of the segment before the tool result, one round late;
        - so dH is 0 behind a trajectory's first call, whatever the tool answered;
        - entropies are summed over as many tokens as there are, so a short segment counts as a certain one.

    Not repeated, because a decision is a function of (tree, entropies, seed), or because it is no decision at all:
        - the baseline keyed by the position in the batch and never reset, so that later batches were compared with
          other prompts' (here: the trajectory's own);
        - the unseeded draw (here: keyed by the place in the tree), and the fork budget that went to the first path that
          asked (here: divided in advance by `split_budget`);
        - entropy over the ten most probable tokens only (here: the exact one, which is larger by the rest);
        - forks of paths that had ended by length, away from a tool result;
        - top-up by one trajectory a round, the made-up end-of-sequence token behind the last call, paths that ended
          silently at an empty tool answer, special tokens within tool results, and the mean over micro-batches.

    Where nothing is clipped or rounded, P = clip(p + w * dH, 0, 1) is the chance of a fork; it is recorded.

    Attributes:
        config: M, N, Z, alpha, beta, k (only how many tokens are sampled before the siblings start).
        vocabulary_size: V.
        seed: the run's seed.
    """

    vocabulary_size: int
    seed: int

    def decide(self, point: ForkPoint) -> Decision:
        """One draw for a fork point; what was sampled behind the tool result has no part in it."""
        rise = (released_sum(point.before_entropies) - released_sum(point.start_entropies)) / math.log(
            self.vocabulary_size
        )
        chance, weight = self.config.branch_probability, self.config.entropy_weight
        draw = uniform_draw(self.seed, point.step, point.task_id, point.path)
        wanted = min(1.0, max(0.0, draw - weight * rise)) <= chance
        siblings, why = fork(point, self.config.beam_size, wanted=wanted, why="draw")
        probability = min(1.0, max(0.0, chance + weight * rise))
        return Decision(siblings, BranchRecord(dH=rise, probability=probability, draw=draw, why=why))


def released_sum(entropies: Float32Array) -> float:
    """Entropy of the first tokens in nats, as many as there are."""
    return float(entropies[:RELEASED_TOKENS].sum(dtype=np.float64))
