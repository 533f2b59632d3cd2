"""Packs: rollout trees laid out in depth-first order, the unit of one forward and backward pass.

Everything here is numpy and a pure function of its inputs, so all ranks that hold the same trees hold the same packs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.algorithms.credit import TreeCredit
from arpo_megatron.tree import Float32Array, Int32Array, Role, RolloutTree

TOKEN_COST_PAIRS = 3000
"""Cost of a token outside attention, in query-key pairs (a 2M-parameter model on two cores); for balance only."""


@dataclass(frozen=True, slots=True)
class TreePack:
    """A forest of n tokens in depth-first order and its m predicted MODEL tokens.

    Attributes:
        token_ids: int32[n].
        position_ids: int32[n], depth in the own trajectory.
        parent_index: int32[n], position of the token that predicts this one, -1 for roots and padding.
        subtree_end: int32[n], one past the last position of the subtree: q attends to k iff k <= q < subtree_end[k].
        targets: int32[m], positions of the MODEL tokens, ascending.
        positive: float32[m], like the next two from the trees' credits.
        negative: float32[m].
        weight: float32[m].
        sampling_logprobs: float32[m] in nats, NaN where unknown.
        tree_index: int32[m], which of the packed trees a target belongs to.
    """

    token_ids: Int32Array
    position_ids: Int32Array
    parent_index: Int32Array
    subtree_end: Int32Array
    targets: Int32Array
    positive: Float32Array
    negative: Float32Array
    weight: Float32Array
    sampling_logprobs: Float32Array
    tree_index: Int32Array

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def attention_pairs(self) -> int:
        """Query-key pairs under the mask."""
        return int(self.position_ids.sum(dtype=np.int64)) + len(self)

    @property
    def cost(self) -> int:
        """Estimated work, in query-key pairs."""
        return self.attention_pairs + TOKEN_COST_PAIRS * len(self)


def pack_trees(
    trees: Sequence[RolloutTree], credits: Sequence[TreeCredit], *, token_budget: int, multiple_of: int = 1
) -> list[TreePack]:
    """Lay whole trees into as few packs as first-fit-decreasing finds.

    Args:
        trees: of one minibatch.
        credits: one a tree.
        token_budget: most tokens of a pack; a larger tree gets a pack of its own.
        multiple_of: packs are padded at the end to a multiple of this (sequence parallelism); a padding token is a root
            of its own that nothing attends to.

    Raises:
        ValueError: trees and credits differ in number or length, or a MODEL token has no token before it.
    """
    if len(trees) != len(credits):
        raise ValueError(f"{len(trees)} trees but {len(credits)} credits")
    layouts = [_lay_out(index, tree, credit) for index, (tree, credit) in enumerate(zip(trees, credits, strict=True))]
    sizes = [len(layout) for layout in layouts]
    return [_join([layouts[i] for i in group], multiple_of) for group in first_fit_decreasing(sizes, token_budget)]


def first_fit_decreasing(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `sizes` in groups whose sums stay within `budget`; a larger item is alone, an empty one left out."""
    groups: list[list[int]] = []
    free: list[int] = []
    for index in sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -sizes[i]):
        place = next((g for g, room in enumerate(free) if sizes[index] <= room), None)
        if place is None:
            groups.append([index])
            free.append(budget - sizes[index])
        else:
            groups[place].append(index)
            free[place] -= sizes[index]
    return groups


def share_packs(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide packs among data-parallel ranks: the costliest first, each to the rank with the least work so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return shares


def empty_pack(multiple_of: int = 1) -> TreePack:
    """Padding only: a micro-batch without loss, for a rank that has fewer packs than another."""
    return _join([], multiple_of)


_FIELDS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "position_ids": np.int32,
    "parent_index": np.int32,
    "subtree_end": np.int32,
    "targets": np.int32,
    "positive": np.float32,
    "negative": np.float32,
    "weight": np.float32,
    "sampling_logprobs": np.float32,
    "tree_index": np.int32,
}


def _depth_first(tree: RolloutTree) -> list[int]:
    children = tree.children()
    order, stack = [], [0]
    while stack:
        index = stack.pop()
        order.append(index)
        stack.extend(reversed(children[index]))
    return order


def _lay_out(index: int, tree: RolloutTree, credit: TreeCredit) -> TreePack:
    """One tree as a pack of its own, without padding."""
    lengths = np.array([len(segment) for segment in tree.segments], np.int64)
    total = int(lengths.sum())
    for name in ("positive", "negative", "weight"):
        if len(getattr(credit, name)) != total:
            raise ValueError(f"tree {index}: {len(getattr(credit, name))} {name} credits for {total} tokens")
    parents = np.array([segment.parent for segment in tree.segments], np.int64)
    order = np.array(_depth_first(tree), np.int64)
    start = np.empty(len(order), np.int64)
    start[order] = np.cumsum(lengths[order]) - lengths[order]
    depth, last = np.zeros(len(order), np.int64), np.full(len(order), -1, np.int64)
    end = start + lengths
    for s in range(len(order)):  # a parent comes before its children
        above = parents[s]
        depth[s] = depth[above] + lengths[above] if above >= 0 else 0
        # The token before an (possibly empty) segment's end; the first token of a child is predicted by it.
        last[s] = end[s] - 1 if lengths[s] else (last[above] if above >= 0 else -1)
    for s in range(len(order) - 1, 0, -1):
        end[parents[s]] = max(end[parents[s]], end[s])

    segment_of = np.repeat(order, lengths[order])
    offset = np.arange(total) - start[segment_of]
    before = np.where(parents >= 0, last[parents], -1)
    parent_index = np.where(offset > 0, np.arange(total) - 1, before[segment_of])
    model = np.array([segment.role is Role.MODEL for segment in tree.segments])
    targets = np.flatnonzero(model[segment_of])
    if np.any(parent_index[targets] < 0):
        raise ValueError(f"tree {index}: a MODEL token has no token before it that could predict it (empty prompt)")
    in_tree = (np.cumsum(lengths) - lengths)[segment_of[targets]] + offset[targets]  # place in segment-index order
    logprobs = [np.full(len(s), np.nan, np.float32) if s.logprobs is None else s.logprobs for s in tree.segments]
    return _pack(
        token_ids=np.concatenate([tree.segments[s].token_ids for s in order]),
        position_ids=depth[segment_of] + offset,
        parent_index=parent_index,
        subtree_end=end[segment_of],
        targets=targets,
        positive=credit.positive[in_tree],
        negative=credit.negative[in_tree],
        weight=credit.weight[in_tree],
        sampling_logprobs=np.concatenate(logprobs)[in_tree],
        tree_index=np.full(len(targets), index),
    )


def _join(layouts: Sequence[TreePack], multiple_of: int) -> TreePack:
    """Layouts side by side, shifted to their places, and padding after them (at least one token)."""
    starts = np.cumsum([0, *(len(layout) for layout in layouts)])
    total = int(starts[-1])
    padding = -total % multiple_of if total else multiple_of
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in _FIELDS}
    for start, layout in zip(starts, layouts, strict=False):
        for name in _FIELDS:
            parts[name].append(getattr(layout, name))
        parts["parent_index"][-1] = np.where(layout.parent_index < 0, -1, layout.parent_index + start)
        parts["subtree_end"][-1] = layout.subtree_end + start
        parts["targets"][-1] = layout.targets + start
    places = np.arange(total, total + padding)
    fill = {
        "token_ids": places * 0,
        "position_ids": places * 0,
        "parent_index": places * 0 - 1,
        "subtree_end": places + 1,
    }
    for name, values in fill.items():
        parts[name].append(values)
    return _pack(**{name: np.concatenate(values) if values else np.zeros(0) for name, values in parts.items()})


def _pack(**arrays: NDArray[Any]) -> TreePack:
    return TreePack(**{name: arrays[name].astype(dtype, copy=False) for name, dtype in _FIELDS.items()})
