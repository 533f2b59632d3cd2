"""The calls that attention makes for a pack: which queries are computed together, and with which keys.

A pack is a forest in depth-first order and `subtree_end` is its whole mask: query q attends to key k iff
k <= q < subtree_end[k]. A dense call would compute every pair of the pack. One call per chain of the tree would spend
more on overhead than on arithmetic when the chains are short. So the queries are cut into blocks [a, b) of consecutive
tokens, and each block sees few keys.

A block needs only the ancestors of its first token and the block itself. Proof: if k < a <= q < b and q attends to k,
then q < subtree_end[k], so a lies in k's subtree and attends to k too. The ancestors are a few contiguous slices; a
small boolean mask decides the pairs inside the block and those with ancestors whose subtree ends in it.

`cut_blocks` chooses the cuts: a pure function of `subtree_end` that minimises a cost model. Context parallelism
divides the blocks among its ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpo_megatron.packing.balance import (
    CHAIN_STEP,
    TYPICAL_COST,
    CostModel,
    allowed_cuts,
    depths,
    divide_work,
    trace_spans,
)
from arpo_megatron.packing.layout import Span

MAX_BLOCK = 256
"""Largest number of queries in one call."""
CALL_COST_PAIRS = 6000
"""Overhead of one call, forward and backward, in query-key pairs: 0.15 ms against 26 ns on two cores."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """One call: the queries [start, stop) and the keys they need."""

    start: int
    stop: int
    ancestors: tuple[Span, ...]
    """Spans of keys before `start`, ascending. The keys of the call are these spans, then the block itself."""
    mask: NDArray[np.bool_]
    """bool[stop - start, keys], True if a query attends to a key."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The calls for one pack, or for the queries of one context-parallel rank."""

    blocks: tuple[AttentionBlock, ...]
    """Blocks in ascending order, without overlap."""
    piece_sizes: tuple[int, ...]
    """Lengths of the pieces that keys and values are split into. Every span is a run of whole pieces."""
    keys: tuple[tuple[int, ...], ...]
    """Indices of the pieces that form the keys of each block."""
    masks: tuple[Tensor, ...]
    """The mask of each block, bool[queries, keys]."""

    @property
    def queries(self) -> int:
        """Number of queries in all blocks."""
        return sum(block.stop - block.start for block in self.blocks)

    @property
    def pairs(self) -> int:
        """Number of query-key pairs computed, masked pairs included."""
        return sum(block.mask.size for block in self.blocks)


def cut_blocks(subtree_end: NDArray[np.int32], first_query: int = 0) -> list[Span]:
    """Cut a pack's queries into blocks of at most `MAX_BLOCK` at the lowest cost.

    Cuts are allowed at chain boundaries (the depth-first order jumps or a subtree ends) and inside long chains. A block
    costs its queries times its keys plus `CALL_COST_PAIRS`; dynamic programming minimises the sum.

    Args:
        subtree_end: int32[n], one past the last position of each token's subtree.
        first_query: earlier tokens are keys only.
    """
    above = depths(subtree_end)
    cuts = allowed_cuts(subtree_end, CHAIN_STEP)
    cuts = np.concatenate([[first_query], cuts[cuts > first_query]]) if first_query else cuts
    best = np.zeros(len(cuts))
    previous = np.zeros(len(cuts), np.int64)
    first = 0
    for i in range(1, len(cuts)):
        while cuts[i] - cuts[first] > MAX_BLOCK:
            first += 1
        starts = cuts[first:i]
        sizes = cuts[i] - starts
        costs = best[first:i] + sizes * (above[starts] + sizes) + CALL_COST_PAIRS
        choice = int(np.argmin(costs))
        best[i], previous[i] = costs[choice], first + choice
    return trace_spans(cuts, previous)


def share_blocks(
    subtree_end: NDArray[np.int32], first_query: int, ranks: int, cost: CostModel = TYPICAL_COST
) -> list[list[Span]]:
    """Divide a pack's blocks among context-parallel ranks so that their estimated work is about equal.

    Args:
        subtree_end: int32[n], one past the last position of each token's subtree.
        first_query: earlier tokens are keys only.
        ranks: number of context-parallel ranks.
        cost: model of the work.

    Returns:
        The blocks of each rank, ascending.
    """
    blocks = cut_blocks(subtree_end, first_query)
    if ranks == 1:
        return [blocks]
    above = depths(subtree_end)
    sizes = [stop - start for start, stop in blocks]
    keys = [int(above[start]) + size for (start, _), size in zip(blocks, sizes, strict=True)]
    costs = [cost.cost(size, size * seen, 0) for size, seen in zip(sizes, keys, strict=True)]
    return [[blocks[i] for i in sorted(share)] for share in divide_work(costs, ranks)]


def plan_attention(subtree_end: NDArray[np.int32], spans: Sequence[Span] | None = None) -> AttentionPlan:
    """Plan the calls for some blocks of a pack.

    Args:
        subtree_end: int32[n], one past the last position of each token's subtree.
        spans: blocks from `cut_blocks` or `share_blocks`; None plans the whole pack.
    """
    spans = cut_blocks(subtree_end) if spans is None else spans
    blocks = tuple(_block(subtree_end, start, stop) for start, stop in spans)
    edges = sorted(
        {0, len(subtree_end)} | {edge for b in blocks for span in (*b.ancestors, (b.start, b.stop)) for edge in span}
    )
    index = {edge: i for i, edge in enumerate(edges)}
    keys = tuple(
        tuple(piece for low, high in (*b.ancestors, (b.start, b.stop)) for piece in range(index[low], index[high]))
        for b in blocks
    )
    sizes = tuple(int(size) for size in np.diff(np.array(edges, np.int64)))
    return AttentionPlan(blocks, sizes, keys, tuple(torch.from_numpy(b.mask) for b in blocks))


def _block(subtree_end: NDArray[np.int32], start: int, stop: int) -> AttentionBlock:
    above = np.flatnonzero(subtree_end[:start] > start)
    breaks = np.flatnonzero(np.diff(above) > 1) + 1
    runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(above, breaks) if len(run)]
    key, query = np.concatenate([above, np.arange(start, stop)]), np.arange(start, stop)[:, None]
    return AttentionBlock(start, stop, tuple(runs), (key <= query) & (query < subtree_end[key]))
