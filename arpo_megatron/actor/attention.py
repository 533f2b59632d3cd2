"""Tree attention: the core attention of a pack, one scaled-dot-product call a block of queries.

A pack is a forest in depth-first order and `subtree_end` is its whole mask: query q attends to key k iff
k <= q < subtree_end[k]. A dense call would compute every pair of the pack; a call for every chain of the tree would
drown short trees in overhead. So the queries are cut into blocks [a, b) of consecutive tokens, each against few keys.

Why that is enough: if k < a <= q < b and q attends to k, then q < subtree_end[k], so a lies in k's subtree too and
attends to k itself. The keys outside a block are therefore the ancestors of its FIRST token, a few contiguous slices.
Inside the block (and for ancestors whose subtree ends in it) a small boolean mask decides.

Where to cut is decided by `plan_attention`, a pure function of `subtree_end`: the cheapest cut under a cost model.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.module import MegatronModule
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from arpo_megatron.errors import UserError

MAX_BLOCK = 256
"""Most queries of one call."""
CHAIN_STEP = 64
"""A long chain may be cut at every multiple of this many tokens from its start."""
CALL_COST_PAIRS = 6000
"""Overhead of a call, forward and backward, in query-key pairs (six heads of 32, two cores: 0.15 ms against 26 ns)."""
PLANS_KEPT = 16
"""Plans in the cache. All layers use a pack's plan in turn; making one anew takes milliseconds."""

Span = tuple[int, int]


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
    """All calls of one pack.

    Attributes:
        blocks: they partition the tokens, ascending.
        piece_sizes: lengths of the pieces that keys and values are split into (every span is a run of whole pieces).
        keys: for each block, the pieces whose concatenation are its keys.
        masks: for each block its mask as a tensor.
    """

    blocks: tuple[Block, ...]
    piece_sizes: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]
    masks: tuple[Tensor, ...]

    @property
    def pairs(self) -> int:
        """Query-key pairs computed, masked ones included."""
        return sum(block.mask.size for block in self.blocks)


def cut_blocks(subtree_end: NDArray[np.int32]) -> list[Span]:
    """The cheapest cut of a pack into blocks of at most `MAX_BLOCK` queries.

    Cuts are allowed where the depth-first order jumps or a subtree ends (chain boundaries) and inside long chains.
    A block costs its queries times its keys plus `CALL_COST_PAIRS`; the sum is minimised by dynamic programming.

    Args:
        subtree_end: int32[n], one past the last position of each token's subtree.
    """
    n = len(subtree_end)
    depths = _depths(subtree_end)
    cuts = _allowed_cuts(subtree_end)
    best = np.zeros(len(cuts))
    previous = np.zeros(len(cuts), np.int64)
    first = 0
    for i in range(1, len(cuts)):
        while cuts[i] - cuts[first] > MAX_BLOCK:
            first += 1
        starts = cuts[first:i]
        sizes = cuts[i] - starts
        costs = best[first:i] + sizes * (depths[starts] + sizes) + CALL_COST_PAIRS
        choice = int(np.argmin(costs))
        best[i], previous[i] = costs[choice], first + choice
    spans: list[Span] = []
    i = len(cuts) - 1
    while n and i > 0:
        spans.append((int(cuts[previous[i]]), int(cuts[i])))
        i = int(previous[i])
    return spans[::-1]


def plan_attention(subtree_end: NDArray[np.int32]) -> AttentionPlan:
    """The calls of a pack; equal arrays give the same (cached) plan, on every rank.

    Args:
        subtree_end: int32[n].
    """
    return _plan(np.ascontiguousarray(subtree_end, np.int32).tobytes())


@lru_cache(maxsize=PLANS_KEPT)
def _plan(raw: bytes) -> AttentionPlan:
    subtree_end = np.frombuffer(raw, np.int32)
    blocks = tuple(_block(subtree_end, start, stop) for start, stop in cut_blocks(subtree_end))
    edges = sorted({edge for b in blocks for span in (*b.ancestors, (b.start, b.stop)) for edge in span})
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


def _depths(subtree_end: NDArray[np.int32]) -> NDArray[np.int64]:
    """Number of ancestors of each token: subtrees opened before it, less those that have ended."""
    n = len(subtree_end)
    ended = np.cumsum(np.bincount(subtree_end, minlength=n + 1))[:n]
    return np.arange(n) - ended


def _allowed_cuts(subtree_end: NDArray[np.int32]) -> NDArray[np.int64]:
    """Ascending positions, 0 and n among them, at most `CHAIN_STEP` apart."""
    n = len(subtree_end)
    # A chain goes on from t-1 to t when t is the only child: then both subtrees end at one place.
    heads = (
        np.flatnonzero(np.concatenate([[True], subtree_end[1:] != subtree_end[:-1]])) if n else np.zeros(0, np.int64)
    )
    edges = np.append(heads, n)
    steps = [np.arange(low, high, CHAIN_STEP) for low, high in pairwise(edges)]
    return np.concatenate([*steps, [n]]).astype(np.int64)


def tree_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Attention of one pack under its tree mask.

    Args:
        query: [n, heads, head_dim]; key, value: [n, groups, head_dim] with heads a multiple of groups.
        plan: from `plan_attention` of the pack.
        scale: factor of the scores.

    Returns:
        [n, heads, head_dim], the type of `query`.
    """
    grouped = query.shape[1] != key.shape[1]
    # One split each, and concatenation: indexing the same tensor once a block would add a full-size gradient a block.
    queries = query.transpose(0, 1).unsqueeze(0).split([b.stop - b.start for b in plan.blocks], dim=2)
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
        for block_queries, pieces, mask in zip(queries, plan.keys, plan.masks, strict=True)
    ]
    return torch.cat(outputs, dim=2).squeeze(0).transpose(0, 1)


def _join(parts: tuple[Tensor, ...], pieces: tuple[int, ...]) -> Tensor:
    return parts[pieces[0]] if len(pieces) == 1 else torch.cat([parts[piece] for piece in pieces], dim=2)


class TreeAttention(MegatronModule):  # type: ignore[misc]
    """Core attention of a layer spec, in the place of Megatron's DotProductAttention.

    The pack's `subtree_end` (int32[n], a plain tensor, so that recomputation can save it) comes as `attention_mask`.

    Raises:
        UserError: with CUDA, whose kernel (FlexAttention over the same plan) is not there yet.
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
        if torch.cuda.is_available():
            raise UserError(
                "tree attention has no CUDA kernel yet: hide the GPU (CUDA_VISIBLE_DEVICES=) to train on the CPU"
            )
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
        """query [n, 1, heads, dim] and key, value [n, 1, groups, dim] of this rank -> [n, 1, heads * dim]."""
        plan = plan_attention(attention_mask.numpy())
        output = tree_attention(query.squeeze(1), key.squeeze(1), value.squeeze(1), plan, self.softmax_scale)
        return output.reshape(len(query), 1, -1)
