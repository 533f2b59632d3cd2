"""The work of the slowest data-parallel rank: trees of an update divided among ranks as the trainer divides them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from statistics import mean

from arpo_megatron.config import JobConfig
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.balance import CostModel, divide_work
from arpo_megatron.plan.synthetic_trees import Mix
from arpo_megatron.plan.workload import Workload, varied
from arpo_megatron.tree import Role, RolloutTree

LEAST_TREES = 128
"""Trees that are drawn at least, for the mean over several updates."""


@dataclass(frozen=True, slots=True)
class TreeSize:
    """Work of a tree that is computed in one piece."""

    tokens: int
    pairs: int
    """Unmasked query-key pairs."""
    targets: int
    """Predicted tokens."""

    @classmethod
    def of(cls, tree: RolloutTree) -> "TreeSize":
        """Count a tree's work from the lengths of its segments."""
        starts, pairs = [0] * len(tree.segments), 0
        for index, segment in enumerate(tree.segments):
            above, length = segment.parent, len(segment)
            starts[index] = starts[above] + len(tree.segments[above]) if above >= 0 else 0
            pairs += length * starts[index] + length * (length + 1) // 2
        targets = sum(len(segment) for segment in tree.segments if segment.role is Role.MODEL)
        return cls(tree.unique_tokens, pairs, targets)


def slowest_rank(config: JobConfig, spec: ModelSpec, work: Workload, trees: int) -> float:
    """Return the work of a job's slowest rank in an update of `trees` trees, in mean trees: a mean over many updates.

    Lengths of segments vary from half to three halves (an assumption, as in `arpo plan --simulate`).
    """
    return _slowest(work.family, spec, trees, config.parallel.data, lockstep=config.parallel.expert > 1)


@cache
def _slowest(family: Mix, spec: ModelSpec, trees: int, ranks: int, *, lockstep: bool) -> float:
    model = CostModel.of(spec)
    count = -(-LEAST_TREES // trees) * trees
    costs = [model.cost(size.tokens, size.pairs, size.targets) for size in _sizes(varied(family), count)]
    updates = [costs[first : first + trees] for first in range(0, count, trees)]
    return mean(most_work(update, ranks, lockstep=lockstep) for update in updates) / mean(costs)


def most_work(costs: Sequence[float], ranks: int, *, lockstep: bool) -> float:
    """Return the work of the slowest rank for trees of these costs.

    Args:
        costs: work of each tree.
        ranks: number of data-parallel ranks.
        lockstep: ranks wait for each other after every tree (experts on several ranks), not only after the last one.
    """
    busy = min(ranks, len(costs))  # further ranks have no tree
    shares = [sorted((costs[tree] for tree in share), reverse=True) for share in divide_work(costs, busy)]
    if lockstep:
        return sum(map(max, zip_longest(*shares, fillvalue=0.0)))
    return max(map(sum, shares))


@cache
def _sizes(family: Mix, count: int) -> tuple[TreeSize, ...]:
    return tuple(TreeSize.of(family.tree(seed, 64)) for seed in range(count))
