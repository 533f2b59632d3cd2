"""Tree attention: the core attention of a pack, one scaled-dot-product call a block of queries.

A pack is a forest in depth-first order and `subtree_end` is its whole mask: query q attends to key k iff
k <= q < subtree_end[k]. A dense call would compute every pair of the pack; a call for every chain of the tree would
drown short trees in overhead. So the queries are cut into blocks [a, b) of consecutive tokens, each against few keys.

Why that is enough: if k < a <= q < b and q attends to k, then q < subtree_end[k], so a lies in k's subtree too and
attends to k itself. The keys outside a block are therefore the ancestors of its FIRST token, a few contiguous slices.
Inside the block (and for ancestors whose subtree ends in it) a small boolean mask decides.

Where to cut is decided by `cut_blocks`, a pure function of `subtree_end`: the cheapest cut under a cost model. Context
parallelism divides the blocks among its ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.module import MegatronModule
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from arpo_megatron.actor.context import lookup
from arpo_megatron.actor.flex_attention import FlexPlan, flex_tree_attention
from arpo_megatron.packing.balance import TYPICAL_COST, CostModel, allowed_cuts, depths, share_out, spans_back
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
    return spans_back(cuts, previous)


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
    return [[blocks[i] for i in sorted(share)] for share in share_out(costs, ranks)]


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


def tree_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Attention of one pack under its tree mask.

    Args:
        query: [q, heads, head_dim], the tokens of the plan's blocks one after the other; what follows them is padding.
        key: [n, groups, head_dim] with heads a multiple of groups, all tokens of the pack.
        value: like `key`.
        plan: from `plan_attention`.
        scale: factor of the scores.

    Returns:
        [q, heads, head_dim], the type of `query`; zeros for padding.
    """
    sizes = [block.stop - block.start for block in plan.blocks]
    padding = len(query) - plan.queries
    grouped = query.shape[1] != key.shape[1]
    # One split each, and concatenation: indexing the same tensor once a block would add a full-size gradient a block.
    queries = query.transpose(0, 1).unsqueeze(0).split([*sizes, padding], dim=2)
    keys = key.transpose(0, 1).unsqueeze(0).split(plan.piece_sizes, dim=2)
    values = value.transpose(0, 1).unsqueeze(0).split(plan.piece_sizes, dim=2)
    outputs = [
        scaled_dot_product_attention(
            block_queries,
            _join(keys, pieces),
            _join(values, pieces),
            attn_mask=mask,
            scale=scale,
            enable_gqa=grouped,
        )
        for block_queries, pieces, mask in zip(queries, plan.keys, plan.masks, strict=False)
    ]
    if padding:
        # Zeros that depend on keys and values: a rank with nothing but padding takes part in summing their gradients.
        outputs.append(torch.zeros_like(queries[-1]) + 0.0 * (key[:1].sum() + value[:1].sum()))
    return torch.cat(outputs, dim=2).squeeze(0).transpose(0, 1)


def _join(parts: tuple[Tensor, ...], pieces: tuple[int, ...]) -> Tensor:
    return parts[pieces[0]] if len(pieces) == 1 else torch.cat([parts[piece] for piece in pieces], dim=2)


class TreeAttention(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """Core attention of a layer spec, in the place of Megatron's DotProductAttention.

    What it needs to know of the pack it finds by the handle that comes as `attention_mask` (see context.py).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [q, 1, heads, dim] and key, value [q, 1, groups, dim] of this rank -> [q, 1, heads * dim]."""
        context = lookup(attention_mask)
        keys, values = context.keys_and_values(self.layer_number, key.squeeze(1), value.squeeze(1))
        plan, tensors = context.plan, (query.squeeze(1), keys, values)
        if isinstance(plan, FlexPlan):
            output = flex_tree_attention(*tensors, plan, self.softmax_scale)
        else:
            output = tree_attention(*tensors, plan, self.softmax_scale)
        return output.reshape(len(query), 1, -1)
