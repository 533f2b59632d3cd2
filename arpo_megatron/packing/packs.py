"""Packs: rollout trees laid out in depth-first order, the unit of one forward and backward pass.

Trees that fit the token budget are packed whole, several to a pack; the system prompt that all of them begin with is
computed once a pack. A larger tree is cut into stretches of its depth-first order. What such a stretch attends to
outside of itself are the ancestors of its first token: it inherits their keys and values from the packs that computed
them, so nothing is computed twice (`schedule.py` keeps the order that this needs). Where that order is impossible, in a
pipeline and with experts on several ranks, the ancestors are computed again, without loss.
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
from arpo_megatron.packing.layout import TreePack, cut, join, lay_out, on_rank, shared_prefix
from arpo_megatron.tree import Float32Array, Int32Array, RolloutTree

__all__ = ["PackReport", "TreePack", "pack_batch", "pack_trees", "rank_costs", "report"]

SAME_BEGINNING = 16
"""Tokens by which prompts are taken for those of one system prompt."""


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
    """Packs of one minibatch, those of a data-parallel rank in the order in which it computes them.

    Args:
        trees: of one minibatch.
        credits: one a tree.
        token_budget: most tokens of a pack.
        ranks: data-parallel ranks to share them out to.
        inherit: cut packs inherit ancestors; False: they repeat them (pipelines, expert parallelism).
        in_step: ranks meet in every pass (experts on several), so their packs come by falling cost, like with like;
            not with `inherit`, which has an order of its own.
        share_prompt: compute the beginning that the prompts of all trees of a pack have in common once.
        cost: what balances ranks and packs.

    Raises:
        ValueError: trees and credits differ in number or length, a MODEL token has no token before it, the budget or
            the number of ranks is not positive, or `inherit` and `in_step` are both asked for.
    """
    if inherit and in_step:
        raise ValueError("packs that inherit have an order of their own: not with in_step")
    if token_budget < 1 or ranks < 1:
        raise ValueError(f"packs of at most {token_budget} tokens for {ranks} ranks: both must be at least 1")
    if len(trees) != len(credits):
        raise ValueError(f"{len(trees)} trees but {len(credits)} credits")
    layouts = [lay_out(index, tree, credit) for index, (tree, credit) in enumerate(zip(trees, credits, strict=True))]
    costs = [_cost(layout, cost) for layout in layouts]
    packs: list[TreePack] = []
    for rank, share in enumerate(divide_work(costs, ranks)):
        fitting = sorted(i for i in share if 0 < len(layouts[i]) <= token_budget)
        prompts = [trees[i].prompt_ids if share_prompt else trees[i].prompt_ids[:0] for i in fitting]
        for alike in _by_beginning(prompts):
            members = [layouts[fitting[i]] for i in alike]
            shared = shared_prefix(members, [len(prompts[i]) for i in alike])
            sizes = [len(member) - shared for member in members]
            for group in balanced_groups(sizes, [costs[fitting[i]] for i in alike], token_budget - shared):
                packs.append(on_rank(join([members[i] for i in group], shared if len(group) > 1 else 0), rank))
        for index in sorted(i for i in share if len(layouts[i]) > token_budget):
            spans = cut_spans(layouts[index].subtree_end, token_budget, inherit=inherit)
            parts = cut(layouts[index], spans, first_pack=len(packs), inherit=inherit)
            packs += [on_rank(part, rank) for part in parts]
    if in_step:
        packs.sort(key=lambda pack: (pack.data_rank, -_cost(pack, cost)))
    return packs


def _by_beginning(prompts: Sequence[Int32Array]) -> list[list[int]]:
    """Indices of prompts with the same first tokens, for packs that share them; short or odd ones are one group."""
    groups: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt[:SAME_BEGINNING].tobytes(), []).append(index)
    alike = [group for group in groups.values() if len(group) > 1 and len(prompts[group[0]]) >= SAME_BEGINNING]
    rest = sorted(set(range(len(prompts))).difference(*alike))
    return [*alike, *([rest] if rest else [])]


def pack_batch(
    trees: Sequence[RolloutTree], credits: Sequence[TreeCredit], config: JobConfig, spec: ModelSpec
) -> list[TreePack]:
    """`pack_trees` for the job's budget, layout and model."""
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
    """The packs with other credits for the same trees."""

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
    """Values of the packs' targets as one array a tree, in segment-index order; NaN where a tree has no target.

    Args:
        packs: of these trees.
        values: float[m] a pack.
        trees: of the minibatch.
    """
    found = [np.full(tree.unique_tokens, np.nan) for tree in trees]
    for pack, own in zip(packs, values, strict=True):
        for tree in np.unique(pack.tree_index):
            here = pack.tree_index == tree
            found[int(tree)][pack.token_index[here]] = own[here]
    return found


@dataclass(frozen=True, slots=True)
class PackReport:
    """What packing made of a minibatch, in tokens unless said otherwise.

    Attributes:
        packs: their number.
        unique: tokens of the trees, each once.
        flat: tokens of all trajectories.
        computed: tokens of the packs.
        repeated: computed more than once, because a cut repeats ancestors.
        inherited: ancestors whose keys and values a cut hands down.
        saved_by_shared_prompt: not computed, because trees of a pack share their system prompt.
        live_tokens: most tokens whose activations live at once on a rank.
        imbalance: the costliest rank's work over the mean, less 1; where ranks meet in every pass (experts on several),
            the sum over passes of the costliest pack in it takes the place of the costliest rank.
    """

    packs: int
    unique: int
    flat: int
    computed: int
    repeated: int
    inherited: int
    saved_by_shared_prompt: int
    live_tokens: int
    imbalance: float

    def row(self) -> dict[str, float]:
        """Metrics under `pack/`."""
        return {f"pack/{name}": value for name, value in asdict(self).items()}


def report(
    packs: Sequence[TreePack],
    trees: Sequence[RolloutTree],
    *,
    ranks: int = 1,
    in_flight: int = 1,
    in_step: bool = False,
    cost: CostModel = TYPICAL_COST,
) -> PackReport:
    """Measure `pack_trees`' answer.

    Args:
        packs: of these trees.
        trees: of a minibatch.
        ranks: data-parallel ranks.
        in_flight: packs alive at once, the depth of the pipeline.
        in_step: ranks meet in every pass.
        cost: that of `pack_trees`.
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
        live_tokens=max(_live_tokens(packs) if in_flight == 1 else _in_pipeline(packs, in_flight), default=0),
        imbalance=slowest / mean - 1.0 if mean else 0.0,
    )


def rank_costs(packs: Sequence[TreePack], ranks: int, cost: CostModel) -> list[float]:
    """Estimated work of each data-parallel rank, in query-key pairs."""
    work = [0.0] * ranks
    for pack in packs:
        work[pack.data_rank] += _cost(pack, cost)
    return work


def _cost(pack: TreePack, cost: CostModel) -> float:
    return cost.cost(len(pack), pack.attention_pairs, len(pack.predictors))


def last_uses(packs: Sequence[TreePack]) -> list[int]:
    """For each pack the index of the last one that inherits from it, its own index where none does."""
    last = list(range(len(packs)))
    for index, pack in enumerate(packs):
        for source in np.unique(pack.inherited_pack):
            last[int(source)] = index
    return last


def _in_pipeline(packs: Sequence[TreePack], depth: int) -> list[int]:
    """Tokens alive on the first stage, which runs ahead by the depth of the pipeline, at each of its forward passes."""
    held = []
    for rank in {pack.data_rank for pack in packs}:
        sizes = [len(pack) for pack in packs if pack.data_rank == rank]
        held += [sum(sizes[max(0, last + 1 - depth) : last + 1]) for last in range(len(sizes))]
    return held


def _live_tokens(packs: Sequence[TreePack]) -> list[int]:
    """Tokens alive at each forward pass: a pack waits for the last one that hangs below it (see schedule.py)."""
    last, stack, held = last_uses(packs), list[int](), []
    for index in range(len(packs)):
        while stack and last[stack[-1]] < index:
            stack.pop()
        stack.append(index)
        held.append(sum(len(packs[i]) for i in stack))
    return held
