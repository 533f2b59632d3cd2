"""Packs of a batch: rollout trees grouped or cut to the token budget and divided among data-parallel ranks.

Trees that fit the budget are packed whole, several per pack; the system prompt they share is computed once per pack. A
larger tree is cut into stretches of its depth-first order. A stretch attends outside itself only to the ancestors of
its first token. It inherits their keys and values from the packs that computed them, so nothing is computed twice;
`schedule.py` keeps the order that this needs. If that order is impossible (in a pipeline, and with experts on several
ranks), the ancestors are computed again, without loss.
"""

from collections.abc import Sequence
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

__all__ = ["PackReport", "TreePack", "pack_batch", "pack_trees", "rank_costs", "report_packs"]

SHARED_PREFIX_TOKENS = 16
"""Prompts that agree in this many first tokens are taken for prompts with the same system prompt."""


def pack_trees(
    trees: Sequence[RolloutTree],
    credits: Sequence[TreeCredit],
    *,
    token_budget: int,
    ranks: int = 1,
    inherit: bool = True,
    in_step: bool = False,
    share_prompt: bool = True,
    cost: CostModel = TYPICAL_COST,
) -> list[TreePack]:
    """Pack one batch; the packs of a data-parallel rank come in the order in which it computes them.

    Args:
        trees: trees of one batch.
        credits: one per tree.
        token_budget: largest number of tokens in a pack.
        ranks: number of data-parallel ranks.
        inherit: packs of a cut tree inherit ancestors; False repeats them (pipelines, expert parallelism).
        in_step: all ranks take part in every pass (experts on several ranks), so each rank's packs come by falling
            cost. Not possible with `inherit`, which fixes the order.
        share_prompt: compute the common beginning of the prompts of a pack once.
        cost: balances ranks and packs.

    Raises:
        ValueError: trees and credits differ in number or length, a MODEL token has no token before it, the budget or
            the number of ranks is not positive, or both `inherit` and `in_step` are set.
    """
    if inherit and in_step:
        raise ValueError("inherit and in_step cannot be combined: packs that inherit have a fixed order")
    if token_budget < 1 or ranks < 1:
        raise ValueError(f"token_budget={token_budget} and ranks={ranks} must be at least 1")
    if len(trees) != len(credits):
        raise ValueError(f"{len(trees)} trees but {len(credits)} credits")
    layouts = [lay_out(index, tree, credit) for index, (tree, credit) in enumerate(zip(trees, credits, strict=True))]
    costs = [_cost(layout, cost) for layout in layouts]
    packs: list[TreePack] = []
    for rank, share in enumerate(divide_work(costs, ranks)):
        fitting = sorted(i for i in share if 0 < len(layouts[i]) <= token_budget)
        prompts = [trees[i].prompt_ids if share_prompt else trees[i].prompt_ids[:0] for i in fitting]
        for alike in _group_by_prefix(prompts):
            members = [layouts[fitting[i]] for i in alike]
            shared = shared_prefix(members, [len(prompts[i]) for i in alike])
            sizes = [len(member) - shared for member in members]
            for group in balanced_groups(sizes, [costs[fitting[i]] for i in alike], token_budget - shared):
                pack = join_packs([members[i] for i in group], shared if len(group) > 1 else 0)
                packs.append(replace(pack, data_rank=rank))
        for index in sorted(i for i in share if len(layouts[i]) > token_budget):
            spans = cut_spans(layouts[index].subtree_end, token_budget, inherit=inherit)
            parts = cut_pack(layouts[index], spans, first_pack=len(packs), inherit=inherit)
            packs += [replace(part, data_rank=rank) for part in parts]
    if in_step:
        packs.sort(key=lambda pack: (pack.data_rank, -_cost(pack, cost)))
    return packs


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
    """Call `pack_trees` with the job's budget, layout and model."""
    return pack_trees(
        trees,
        credits,
        token_budget=config.train.token_budget,
        ranks=config.parallel.data,
        inherit=config.parallel.nested_packs,
        in_step=config.parallel.expert > 1,
        cost=CostModel.of(spec),
    )


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
    in_step: bool = False,
    cost: CostModel = TYPICAL_COST,
) -> PackReport:
    """Measure the result of `pack_trees`.

    Args:
        packs: packs of these trees.
        trees: trees of a batch.
        ranks: number of data-parallel ranks.
        in_flight: packs alive at once, the depth of the pipeline.
        in_step: all ranks take part in every pass.
        cost: as in `pack_trees`.
    """
    unique, computed = sum(tree.unique_tokens for tree in trees), sum(len(pack) for pack in packs)
    repeated = sum(pack.repeated for pack in packs)
    costs = [[_cost(pack, cost) for pack in packs if pack.data_rank == rank] for rank in range(ranks)]
    mean = sum(map(sum, costs)) / ranks
    slowest = sum(map(max, zip_longest(*costs, fillvalue=0.0))) if in_step else max(map(sum, costs))
    return PackReport(
        packs=len(packs),
        unique=unique,
        flat=sum(tree.flat_tokens for tree in trees),
        computed=computed,
        repeated=repeated,
        inherited=sum(pack.inherited for pack in packs),
        saved_by_shared_prompt=unique + repeated - computed,
        live_tokens=max(_live_tokens(packs) if in_flight == 1 else _live_in_pipeline(packs, in_flight), default=0),
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


def _live_in_pipeline(packs: Sequence[TreePack], depth: int) -> list[int]:
    """Tokens alive on the first stage, which runs ahead by the depth of the pipeline, at each forward pass."""
    alive = []
    for rank in {pack.data_rank for pack in packs}:
        sizes = [len(pack) for pack in packs if pack.data_rank == rank]
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
