"""Packs of a batch: rollout trees grouped or cut to the token budget and divided among data-parallel ranks.

Trees that fit the budget are packed whole, several per pack; the system prompt they share is computed once per pack. A
larger tree is cut into stretches of its depth-first order. A stretch attends outside itself only to the ancestors of
its first token. It inherits their keys and values from the packs that computed them and does not compute them again;
`schedule.py` keeps the order that this needs. The packs that inherit from each other are a group. In a pipeline, and
with experts on several ranks, all activations of a group are alive at once. A limit of its tokens divides a larger tree
into several groups, each of which computes the ancestors of its first token again, without loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.algorithms.credit import TreeCredit
from arpo_megatron.config import JobConfig
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.balance import TYPICAL_COST, CostModel, balanced_groups, cut_spans, divide_work
from arpo_megatron.packing.layout import TreePack, cut_pack, join_packs, lay_out, shared_prefix
from arpo_megatron.tree import Float32Array, Int32Array, RolloutTree

__all__ = ["PackReport", "TreePack", "pack_batch", "pack_trees", "rank_costs", "rank_groups", "report_packs"]

SHARED_PREFIX_TOKENS = 16
"""Prompts that agree in this many first tokens are taken for prompts with the same system prompt."""


def pack_trees(
    trees: Sequence[RolloutTree],
    credits: Sequence[TreeCredit],
    *,
    token_budget: int,
    ranks: int = 1,
    inherit: bool = True,
    group_tokens: int | None = None,
    lockstep: bool = False,
    share_prompt: bool = True,
    cost: CostModel = TYPICAL_COST,
) -> list[TreePack]:
    """Pack one batch; the packs of a data-parallel rank come in the order in which it computes them.

    The packs of a group follow each other. The first one of a group inherits nothing.

    Args:
        trees: trees of one batch.
        credits: one per tree.
        token_budget: largest number of tokens in a pack.
        ranks: number of data-parallel ranks.
        inherit: packs of a cut tree inherit ancestors; False repeats them.
        group_tokens: largest number of tokens of a group, raised to the longest path; None for groups of whole trees.
        lockstep: all ranks take part in every pass (experts on several ranks), so each rank sorts its groups: the most
            packs first, then the highest cost.
        share_prompt: compute the common beginning of the prompts of a pack once.
        cost: balances ranks and packs.

    Raises:
        ValueError: trees and credits differ in number or length, a MODEL token has no token before it, or the budget or
            the number of ranks is not positive.
    """
    if token_budget < 1 or ranks < 1:
        raise ValueError(f"token_budget={token_budget} and ranks={ranks} must be at least 1")
    if len(trees) != len(credits):
        raise ValueError(f"{len(trees)} trees but {len(credits)} credits")
    tree_packs = [lay_out(index, tree, credit) for index, (tree, credit) in enumerate(zip(trees, credits, strict=True))]
    costs = [_cost(pack, cost) for pack in tree_packs]
    groups: list[list[TreePack]] = []
    for rank, share in enumerate(divide_work(costs, ranks)):
        fitting = sorted(i for i in share if 0 < len(tree_packs[i]) <= token_budget)
        prompts = [trees[i].prompt_ids if share_prompt else trees[i].prompt_ids[:0] for i in fitting]
        for alike in _group_by_prefix(prompts):
            members = [tree_packs[fitting[i]] for i in alike]
            shared = shared_prefix(members, [len(prompts[i]) for i in alike])
            sizes = [len(member) - shared for member in members]
            for group in balanced_groups(sizes, [costs[fitting[i]] for i in alike], token_budget - shared):
                pack = join_packs([members[i] for i in group], shared if len(group) > 1 else 0)
                groups.append([replace(pack, data_rank=rank)])
        for index in sorted(i for i in share if len(tree_packs[i]) > token_budget):
            limit = group_tokens if inherit else token_budget
            for parts in _cut_tree(tree_packs[index], token_budget, limit, inherit=inherit):
                groups.append([replace(pack, data_rank=rank) for pack in parts])
    if lockstep:
        groups.sort(key=lambda parts: (parts[0].data_rank, -len(parts), -sum(_cost(pack, cost) for pack in parts)))
    packs: list[TreePack] = []
    for parts in groups:
        first = np.int32(len(packs))
        packs += [replace(pack, inherited_pack=pack.inherited_pack + first) for pack in parts]
    return packs


def _cut_tree(layout: TreePack, token_budget: int, limit: int | None, *, inherit: bool) -> list[list[TreePack]]:
    """Cut a tree into groups of at most `limit` tokens, whose packs name each other by their index in the group."""
    parts = [layout]
    if limit is not None and len(layout) > limit:
        parts = cut_pack(layout, cut_spans(layout.subtree_end, limit, inherit=False), inherit=False)
    if not inherit:
        return [[part] for part in parts]
    return [
        [part]
        if len(part) <= token_budget
        else cut_pack(part, cut_spans(part.subtree_end, token_budget, inherit=True), inherit=True)
        for part in parts
    ]


def rank_groups(packs: Sequence[TreePack], rank: int) -> list[list[int]]:
    """Return the groups of a data-parallel rank: the indices of packs that inherit from each other."""
    groups: list[list[int]] = []
    for index, pack in enumerate(packs):
        if pack.data_rank == rank:
            if pack.inherited:
                groups[-1].append(index)
            else:
                groups.append([index])
    return groups


def _group_by_prefix(prompts: Sequence[Int32Array]) -> list[list[int]]:
    """Group prompts by their first tokens, for packs that share them; prompts that are short or alone form one
    group."""
    groups: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt[:SHARED_PREFIX_TOKENS].tobytes(), []).append(index)
    alike = [group for group in groups.values() if len(group) > 1 and len(prompts[group[0]]) >= SHARED_PREFIX_TOKENS]
    rest = sorted(set(range(len(prompts))).difference(*alike))
    return [*alike, *([rest] if rest else [])]


def pack_batch(
    trees: Sequence[RolloutTree], credits: Sequence[TreeCredit], config: JobConfig, spec: ModelSpec
) -> list[TreePack]:
    """Call `pack_trees` with the job's budget, layout and model.

    In a pipeline a group is one micro-batch: large groups repeat no ancestors, small ones make a smaller bubble. The
    cost model chooses the size.
    """
    parallel, cost = config.parallel, CostModel.of(spec)

    def pack(limit: int | None) -> list[TreePack]:
        return pack_trees(
            trees,
            credits,
            token_budget=config.train.token_budget,
            ranks=parallel.data,
            group_tokens=limit,
            lockstep=parallel.expert > 1,
            cost=cost,
        )

    limits = group_limits(config, longest_path(trees))
    _, packs = fastest_groups(pack, limits, parallel.data, parallel.pipeline, parallel.virtual_pipeline, cost)
    return packs


def fastest_groups(
    pack: Callable[[int | None], list[TreePack]],
    limits: Sequence[int | None],
    ranks: int,
    stages: int,
    chunks: int,
    cost: CostModel,
) -> tuple[int | None, list[TreePack]]:
    """Return the size of groups with the smallest `pipeline_cost`, and its packs.

    Args:
        pack: returns the packs of all ranks for a size of groups.
        limits: sizes to choose from, ascending (`group_limits`).
        ranks: as in `pipeline_cost`, like the other arguments.
    """
    fastest: tuple[float, int | None, list[TreePack]] | None = None
    for limit in limits:
        packs = pack(limit)
        found = pipeline_cost(packs, ranks, stages, chunks, cost)
        if fastest is None or found < fastest[0]:
            fastest = found, limit, packs
        if not any(one.repeated for one in packs):
            break  # larger limits give the same groups
    assert fastest is not None
    return fastest[1:]


def longest_path(trees: Sequence[RolloutTree]) -> int:
    """Return the number of tokens of the longest path of any tree."""
    return max((len(tree.path_tokens(leaf)) for tree in trees for leaf in tree.leaves()), default=0)


def group_limits(config: JobConfig, longest: int) -> list[int | None]:
    """Return the sizes of groups to choose from, ascending; None for whole trees.

    Args:
        config: the job.
        longest: number of tokens of the longest path, which a group must hold.
    """
    limit, budget = config.train.group_tokens, config.train.token_budget
    if config.parallel.nested_packs:
        return [None]
    smaller = [size for size in (budget, 2 * budget, 4 * budget) if longest <= size and (limit is None or size < limit)]
    return [*smaller, limit] if config.parallel.pipeline > 1 else [limit]


def pipeline_cost(packs: Sequence[TreePack], ranks: int, stages: int, chunks: int, cost: CostModel) -> float:
    """Return the estimated work of the slowest data-parallel rank of a pipeline, with its bubble.

    Args:
        packs: packs of all ranks.
        ranks: number of data-parallel ranks.
        stages: number of pipeline stages.
        chunks: number of model chunks per stage.
        cost: model of the work.
    """
    slowest = 0.0
    for rank in range(ranks):
        work = [sum(_cost(packs[index], cost) for index in group) for group in rank_groups(packs, rank)]
        slowest = max(slowest, sum(work) + (stages - 1) / chunks * max(work, default=0.0))
    return slowest


def replace_credits(packs: Sequence[TreePack], credits: Sequence[TreeCredit]) -> list[TreePack]:
    """Return the packs with other credits for the same trees."""

    def field(pack: TreePack, name: str) -> Float32Array:
        values = np.zeros(len(pack.predictors), np.float32)
        for tree in np.unique(pack.tree_index):
            here = pack.tree_index == tree
            values[here] = getattr(credits[int(tree)], name)[pack.token_index[here]]
        return values

    return [
        replace(p, positive=field(p, "positive"), negative=field(p, "negative"), weight=field(p, "weight"))
        for p in packs
    ]


def split_by_tree(
    packs: Sequence[TreePack], values: Sequence[Float32Array], trees: Sequence[RolloutTree]
) -> list[NDArray[np.float64]]:
    """Return values of the packs' targets as one array per tree, in segment-index order; NaN for tokens that are no
    target.

    Args:
        packs: packs of these trees.
        values: float[m] per pack.
        trees: trees of the batch.
    """
    found = [np.full(tree.unique_tokens, np.nan) for tree in trees]
    for pack, own in zip(packs, values, strict=True):
        for tree in np.unique(pack.tree_index):
            here = pack.tree_index == tree
            found[int(tree)][pack.token_index[here]] = own[here]
    return found


@dataclass(frozen=True, slots=True)
class PackReport:
    """Result of packing a batch, in tokens unless noted."""

    packs: int
    unique: int
    """Tokens of the trees, each counted once."""
    flat: int
    """Tokens of all trajectories."""
    computed: int
    """Tokens of the packs."""
    repeated: int
    """Tokens computed more than once, because a cut repeats ancestors."""
    inherited: int
    """Ancestors whose keys and values a cut hands down."""
    saved_by_shared_prompt: int
    """Tokens not computed, because trees of a pack share their system prompt."""
    live_tokens: int
    """Largest number of tokens whose activations are alive at once on a rank."""
    imbalance: float
    """Work of the costliest rank over the mean, minus 1. If all ranks take part in every pass, the sum over passes
    of the costliest pack replaces the costliest rank."""

    def row(self) -> dict[str, float]:
        """Return the fields as metrics with the prefix `pack/`."""
        return {f"pack/{name}": value for name, value in asdict(self).items()}


def report_packs(
    packs: Sequence[TreePack],
    trees: Sequence[RolloutTree],
    *,
    ranks: int = 1,
    in_flight: int = 1,
    lockstep: bool = False,
    cost: CostModel = TYPICAL_COST,
) -> PackReport:
    """Measure the result of `pack_trees`.

    Args:
        packs: packs of these trees.
        trees: trees of a batch.
        ranks: number of data-parallel ranks.
        in_flight: groups alive at once, the depth of the pipeline.
        lockstep: all ranks take part in every pass.
        cost: as in `pack_trees`.
    """
    unique, computed = sum(tree.unique_tokens for tree in trees), sum(len(pack) for pack in packs)
    repeated = sum(pack.repeated for pack in packs)
    costs = rank_costs([pack for pack in packs if pack.data_rank < ranks], ranks, cost)
    mean = sum(costs) / ranks
    slowest = _cost_in_step(packs, ranks, cost) if lockstep else max(costs)
    return PackReport(
        packs=len(packs),
        unique=unique,
        flat=sum(tree.flat_tokens for tree in trees),
        computed=computed,
        repeated=repeated,
        inherited=sum(pack.inherited for pack in packs),
        saved_by_shared_prompt=unique + repeated - computed,
        live_tokens=max(
            _live_in_groups(packs, in_flight) if lockstep or in_flight > 1 else _live_tokens(packs), default=0
        ),
        imbalance=slowest / mean - 1.0 if mean else 0.0,
    )


def rank_costs(packs: Sequence[TreePack], ranks: int, cost: CostModel) -> list[float]:
    """Return the estimated work of each data-parallel rank, in query-key pairs."""
    work = [0.0] * ranks
    for pack in packs:
        work[pack.data_rank] += _cost(pack, cost)
    return work


def _cost(pack: TreePack, cost: CostModel) -> float:
    return cost.cost(len(pack), pack.attention_pairs, len(pack.predictors))


def last_uses(packs: Sequence[TreePack]) -> list[int]:
    """Return for each pack the index of the last pack that inherits from it; its own index if none does."""
    last = list(range(len(packs)))
    for index, pack in enumerate(packs):
        for source in np.unique(pack.inherited_pack):
            last[int(source)] = index
    return last


def _cost_in_step(packs: Sequence[TreePack], ranks: int, cost: CostModel) -> float:
    """Return the sum over passes of the costliest pack; ranks wait for each other in every pass."""
    costs = [[[_cost(packs[i], cost) for i in group] for group in rank_groups(packs, rank)] for rank in range(ranks)]
    total = 0.0
    for groups in zip_longest(*costs, fillvalue=[0.0]):
        total += sum(map(max, zip_longest(*groups, fillvalue=0.0)))
    return total


def _live_in_groups(packs: Sequence[TreePack], depth: int) -> list[int]:
    """Tokens alive on the first stage, which runs ahead by the depth of the pipeline, at each forward pass."""
    alive = []
    for rank in {pack.data_rank for pack in packs}:
        sizes = [sum(len(packs[index]) for index in group) for group in rank_groups(packs, rank)]
        alive += [sum(sizes[max(0, last + 1 - depth) : last + 1]) for last in range(len(sizes))]
    return alive


def _live_tokens(packs: Sequence[TreePack]) -> list[int]:
    """Tokens alive at each forward pass; a pack waits for the last pack that inherits from it (see schedule.py)."""
    last, stack, alive = last_uses(packs), list[int](), []
    for index in range(len(packs)):
        while stack and last[stack[-1]] < index:
            stack.pop()
        stack.append(index)
        alive.append(sum(len(packs[i]) for i in stack))
    return alive
