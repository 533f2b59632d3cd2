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

from arpo_megatron.packing.balance import TYPICAL_COST, CostModel, allowed_cuts, depths, divide_work, trace_spans
from arpo_megatron.packing.layout import Span

MAX_BLOCK = 256
"""Most queries of one call."""
CHAIN_STEP = 64
"""A long chain may be cut at every multiple of this many tokens from its start."""
CALL_COST_PAIRS = 6000
"""Overhead of a call, forward and backward, in query-key pairs (six heads of 32, two cores: 0.15 ms against 26 ns)."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [start, stop) of one call.

    Attributes:
        ancestors: spans of the keys before `start`, ascending; the keys of the call are these, then the block itself.
        mask: bool[stop - start, keys], True where a query attends.
    """

    start: int
    stop: int
    ancestors: tuple[Span, ...]
    mask: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The calls of one pack, or of one context-parallel rank's part of it.

    Attributes:
        blocks: ascending, without overlap.
        piece_sizes: lengths of the pieces that keys and values are split into (every span is a run of whole pieces).
        keys: for each block, the pieces whose concatenation are its keys.
        masks: for each block its mask as a tensor.
    """

    blocks: tuple[Block, ...]
    piece_sizes: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]
    masks: tuple[Tensor, ...]

    @property
    def queries(self) -> int:
        """Number of tokens of the blocks."""
        return sum(block.stop - block.start for block in self.blocks)

    @property
    def pairs(self) -> int:
        """Query-key pairs computed, masked ones included."""
        return sum(block.mask.size for block in self.blocks)


def cut_blocks(subtree_end: NDArray[np.int32], first_query: int = 0) -> list[Span]:
    """The cheapest cut of a pack's queries into blocks of at most `MAX_BLOCK`.

    Cuts are allowed where the depth-first order jumps or a subtree ends (chain boundaries) and inside long chains.
    A block costs its queries times its keys plus `CALL_COST_PAIRS`; the sum is minimised by dynamic programming.

    Args:
        subtree_end: int32[n], one past the last position of each token's subtree.
        first_query: tokens before it are keys only.
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
    """Blocks of each context-parallel rank, ascending; their estimated work is as equal as a greedy division makes it.

    Args:
        subtree_end: int32[n] of the pack.
        first_query: tokens before it are keys only.
        ranks: context-parallel ranks.
        cost: what balances them.
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
    """The calls for some blocks of a pack.

    Args:
        subtree_end: int32[n].
        spans: the blocks, from `cut_blocks` or `share_blocks`; None: all of the pack.
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


def _block(subtree_end: NDArray[np.int32], start: int, stop: int) -> Block:
    above = np.flatnonzero(subtree_end[:start] > start)
    breaks = np.flatnonzero(np.diff(above) > 1) + 1
    runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(above, breaks) if len(run)]
    key, query = np.concatenate([above, np.arange(start, stop)]), np.arange(start, stop)[:, None]
    return Block(start, stop, tuple(runs), (key <= query) & (query < subtree_end[key]))
