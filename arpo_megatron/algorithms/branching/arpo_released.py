"""The rule of the released code (github RUC-NLPIR/ARPO, vllm_rollout_with_tools.py), its rounds, and some defects.

It is there to compare with published runs. `arpo` is the rule of the paper.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arpo_megatron.algorithms.branching.base import Decision, ForkingPolicy, ForkPoint, fork, uniform_draw
from arpo_megatron.tree import BranchRecord, Float32Array

RELEASED_TOKENS = 20
"""The released code sums the entropy of this many first tokens of a segment; it has no setting for it."""


@dataclass(frozen=True, slots=True)
class ArpoReleasedPolicy(ForkingPolicy):
    """Fork when clip(u - w * dH, 0, 1) <= p, with a uniform draw u, p = alpha and w = beta.

        dH = (sum of the first <= 20 entropies of the segment that made the call - sum of those of the first segment) /
        log V

    The released code of ARPO (arXiv 2507.19849) in place of its eq. 4 and 5.

    Reproduced:
        - the entropy is that of the segment before the tool result, one round late;
        - so dH is 0 after a trajectory's first call, whatever the tool answered;
        - entropies are summed over as many tokens as there are, so a short segment counts as a certain one;
        - every copy has a draw of its own, so with a beam of more than 2 a fork may fill a part of it;
        - rounds: all paths of a task make one call per round, and the budget of the task goes to them in the order in
          which they were started (`PooledForks.released`);
        - top-up by one trajectory per round, which may fork, after all paths have ended.

    Not reproduced:
        - a baseline keyed by the position in the batch and never reset, which compared later batches with other
          prompts (here: the trajectory's own);
        - an unseeded draw (here: keyed by the place in the tree);
        - rounds of the whole batch: here a task's rounds wait for no other task;
        - entropy over the ten most probable tokens only (here: over all);
        - forks of paths that have ended by length, away from a tool result;
        - a made-up end-of-sequence token after the last call;
        - paths that end silently at an empty tool answer;
        - special tokens within tool results;
        - the mean over micro-batches.

    If nothing is clipped or rounded, P = clip(p + w * dH, 0, 1) is the chance of a fork; it is recorded with the lowest
    draw. Of k, only the number of tokens sampled before the siblings start is used. `algorithm.fork_budget` is ignored.
    """

    released_rounds: ClassVar[bool] = True
    vocabulary_size: int
    """V."""
    seed: int

    def decide(self, point: ForkPoint) -> Decision:
        """Decide by one draw per copy; tokens sampled after the tool result do not matter."""
        rise = (released_entropy(point.before_entropies) - released_entropy(point.start_entropies)) / math.log(
            self.vocabulary_size
        )
        chance, weight = self.config.branch_probability, self.config.entropy_weight
        draws = draw_copies(self.seed, point, self.config.beam_size)
        wanted = [min(1.0, max(0.0, draw - weight * rise)) <= chance for draw in draws]
        siblings, why = fork(point, 1 + sum(wanted), wanted=any(wanted), why="draw")
        probability = min(1.0, max(0.0, chance + weight * rise))
        return Decision(siblings, BranchRecord(dH=rise, probability=probability, draw=min(draws), why=why))


def draw_copies(seed: int, point: ForkPoint, beam: int) -> list[float]:
    """Return a draw for each copy that a fork may start; one for the record if the budget is spent."""
    copies = max(1, min(beam - 1, point.budget))
    places = [point.path, *((*point.path, copy) for copy in range(1, copies))]
    return [uniform_draw(seed, point.step, point.task_id, place) for place in places]


def released_entropy(entropies: Float32Array) -> float:
    """Sum the entropies of the first tokens, as many as there are, in nats."""
    return float(entropies[:RELEASED_TOKENS].sum(dtype=np.float64))
