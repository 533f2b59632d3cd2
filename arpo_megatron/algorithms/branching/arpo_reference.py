"""The entropy rule of the released code (github RUC-NLPIR/ARPO, vllm_rollout_with_tools.py), with three of its defects.

It is there to compare with published runs. `arpo` is the rule of the paper.
"""

import math
from dataclasses import dataclass

import numpy as np

from arpo_megatron.algorithms.branching.base import Decision, ForkingPolicy, ForkPoint, fork, uniform_draw
from arpo_megatron.tree import BranchRecord, Float32Array

RELEASED_TOKENS = 20
"""The released code sums the entropy of this many first tokens of a segment; it has no setting for it."""


@dataclass(frozen=True, slots=True)
class ArpoReferencePolicy(ForkingPolicy):
    """Fork when clip(u - w * dH, 0, 1) <= p, with a uniform draw u, p = alpha and w = beta.

        dH = (sum of the first <= 20 entropies of the segment that made the call - sum of those of the first segment) /
        log V

    The released code of ARPO (arXiv 2507.19849) in place of its eq. 4 and 5.

    Reproduced:
        - the entropy is that of the segment before the tool result, one round late;
        - so dH is 0 after a trajectory's first call, whatever the tool answered;
        - entropies are summed over as many tokens as there are, so a short segment counts as a certain one.

    Not reproduced:
        - a baseline keyed by the position in the batch and never reset, which compared later batches with other
          prompts (here: the trajectory's own);
        - an unseeded draw (here: keyed by the place in the tree);
        - a fork budget that goes to the first path that asks (here: to places in their order, see `PooledForks`);
        - entropy over the ten most probable tokens only (here: over all);
        - forks of paths that have ended by length, away from a tool result;
        - top-up by one trajectory per round;
        - a made-up end-of-sequence token after the last call;
        - paths that end silently at an empty tool answer;
        - special tokens within tool results;
        - the mean over micro-batches.

    If nothing is clipped or rounded, P = clip(p + w * dH, 0, 1) is the chance of a fork; it is recorded. Of k, only the
    number of tokens sampled before the siblings start is used.
    """

    vocabulary_size: int
    """V."""
    seed: int

    def decide(self, point: ForkPoint) -> Decision:
        """Decide by one draw per fork point; tokens sampled after the tool result do not matter."""
        rise = (released_entropy(point.before_entropies) - released_entropy(point.start_entropies)) / math.log(
            self.vocabulary_size
        )
        chance, weight = self.config.branch_probability, self.config.entropy_weight
        draw = uniform_draw(self.seed, point.step, point.task_id, point.path)
        wanted = min(1.0, max(0.0, draw - weight * rise)) <= chance
        siblings, why = fork(point, self.config.beam_size, wanted=wanted, why="draw")
        probability = min(1.0, max(0.0, chance + weight * rise))
        return Decision(siblings, BranchRecord(dH=rise, probability=probability, draw=draw, why=why))


def released_entropy(entropies: Float32Array) -> float:
    """Sum the entropies of the first tokens, as many as there are, in nats."""
    return float(entropies[:RELEASED_TOKENS].sum(dtype=np.float64))
