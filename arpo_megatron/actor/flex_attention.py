"""Tree attention on CUDA: one FlexAttention call a layer, its block mask made on the CPU from subtree intervals.

Query q attends to key k iff k <= q < key_end[k]. The kernel works on blocks of 128 queries by 128 keys and needs to
know of each whether no pair of it attends, all do, or some. Evaluating every pair would cost n^2; two numbers a block
decide instead. Of a query block only its smallest and largest position count, and the first one at or behind a key
block's start; of a key block the smallest and the largest `key_end`:

    full   every key lies at or before the first query, and every key's subtree reaches past the last query
    empty  no query at or behind the block's start, or the first such query lies behind every subtree of the block

Both are exact, and they hold for any ascending list of queries: a whole pack, one whose ancestors' keys come from
earlier packs, or the query blocks of one context-parallel rank.

Lengths are padded to a few sizes, because the kernel is compiled for each pair of lengths. Padding attends to nothing
and nothing attends to it: its blocks are empty and skipped, its rows are zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

BLOCK = 128
"""Queries and keys of a block. The kernel divides it further as it likes."""
COMPILED_LENGTHS = 256
"""Most versions of the kernel: pairs of padded lengths, with and without gradient."""

_Positions = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """The call for one pack, or for one context-parallel rank's queries of it.

    Attributes:
        queries: number of queries.
        keys: number of keys.
        mask: of padded lengths, on the device of the tensors; None without queries.
        full_blocks: blocks all of whose pairs attend.
        partial_blocks: blocks some of whose pairs attend.
    """

    queries: int
    keys: int
    mask: BlockMask | None
    full_blocks: int
    partial_blocks: int

    @property
    def pairs(self) -> int:
        """Query-key pairs computed, masked ones included."""
        return (self.full_blocks + self.partial_blocks) * BLOCK**2


def padded_length(length: int) -> int:
    """The smallest of 128, 256, 384, 512, 768, 1024, 1536 ... (two an octave) that is not smaller."""
    step = max(BLOCK, 1 << max(0, (length - 1).bit_length() - 2))
    return max(1, -(-length // step)) * step


def block_classes(key_end: _Positions, query_positions: _Positions) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which blocks are full and which are partial; the others are empty.

    Args:
        key_end: int[n], one past the last position of each key's subtree (above its own position).
        query_positions: int[q], ascending, q > 0.

    Returns:
        bool[query blocks, key blocks] twice, of the padded lengths.
    """
    n, q = len(key_end), len(query_positions)
    rows, columns = padded_length(q) // BLOCK, padded_length(n) // BLOCK
    starts = np.arange(columns) * BLOCK
    # Padding keys belong to no subtree; padding queries stand at -1, before every key.
    end = np.zeros(columns * BLOCK, np.int64)
    end[:n] = key_end
    last_end, first_end = end.reshape(columns, BLOCK).max(1), end.reshape(columns, BLOCK).min(1)
    position = np.full(rows * BLOCK, -1, np.int64)
    position[:q] = query_positions
    by_block = position.reshape(rows, BLOCK)
    lowest, highest = by_block.min(1)[:, None], by_block.max(1)[:, None]
    full = (starts + BLOCK - 1 <= lowest) & (highest < first_end)
    # The first query of each block that is not before the key block's start.
    first = np.maximum(np.searchsorted(position[:q], starts)[None], np.arange(rows)[:, None] * BLOCK)
    there = first < np.minimum(np.arange(1, rows + 1) * BLOCK, q)[:, None]
    some = there & (last_end > position[np.minimum(first, q - 1)])
    return full, some & ~full


def flex_plan(key_end: _Positions, query_positions: _Positions, device: torch.device | str = "cpu") -> FlexPlan:
    """The block mask of some queries over the keys of a pack.

    Args:
        key_end: int32[n], one past the last position of each key's subtree.
        query_positions: int32[q], ascending positions among the keys.
        device: of queries, keys and values.

    Raises:
        ValueError: positions are not ascending or not among the keys, or a subtree ends before its own root.
    """
    n, q = len(key_end), len(query_positions)
    if np.any(key_end <= np.arange(n)):
        raise ValueError("a token must lie in its own subtree")
    if not q:
        return FlexPlan(0, n, None, 0, 0)
    if np.any(np.diff(query_positions) <= 0) or query_positions[0] < 0 or query_positions[-1] >= n:
        raise ValueError(f"query positions must ascend and lie among the {n} keys")
    full, partial = block_classes(key_end, query_positions)
    lengths = (full.shape[0] * BLOCK, full.shape[1] * BLOCK)
    position = torch.full((lengths[0],), -1, dtype=torch.int32)
    position[:q] = torch.from_numpy(query_positions.astype(np.int32))
    end = torch.zeros(lengths[1], dtype=torch.int32)
    end[:n] = torch.from_numpy(key_end.astype(np.int32))
    # Made on the CPU, so that no kernel is launched for it; then moved.
    mask = BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(position.to(device), end.to(device)),
        seq_lengths=lengths,
    ).to(device)
    return FlexPlan(q, n, mask, int(full.sum()), int(partial.sum()))


def _ordered(blocks: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Number and indices of the marked key blocks of each query block, as int32[1, 1, rows] and [1, 1, rows, columns].

    Marked ones come first, ascending.
    """
    counts = torch.from_numpy(blocks.sum(1).astype(np.int32))
    indices = torch.from_numpy(np.argsort(~blocks, axis=1, kind="stable").astype(np.int32))
    return counts[None, None], indices[None, None]


def _mask_mod(position: Tensor, end: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def attends(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= position[query]) & (position[query] < end[key])

    return attends


def flex_tree_attention(query: Tensor, key: Tensor, value: Tensor, plan: FlexPlan, scale: float) -> Tensor:
    """Attention of one pack under its tree mask.

    Args:
        query: [q, heads, head_dim], the plan's queries; what follows them is padding.
        key: [n, groups, head_dim] with heads a multiple of groups, all keys of the plan.
        value: like `key`.
        plan: from `flex_plan`, on the same device.
        scale: factor of the scores.

    Returns:
        [q, heads, head_dim], the type of `query`; zeros for padding.

    On a CPU there is no gradient, and every pair is computed: that is for tests.
    """
    if plan.mask is None:
        # Zeros that depend on keys and values: a rank with nothing but padding takes part in summing their gradients.
        return torch.zeros_like(query) + 0.0 * (key[:1].sum() + value[:1].sum())
    query_length, key_length = plan.mask.shape[-2:]
    output: Tensor = _kernel(query.is_cuda)(
        _padded(query[: plan.queries], query_length),
        _padded(key, key_length),
        _padded(value, key_length),
        block_mask=plan.mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    result = output.squeeze(0).transpose(0, 1)[: len(query)]
    return result if len(result) == len(query) else pad(result, (0, 0, 0, 0, 0, len(query) - len(result)))


def _padded(tensor: Tensor, length: int) -> Tensor:
    """[tokens, heads, dim] -> [1, heads, length, dim]; new tokens are zeros."""
    return pad(tensor, (0, 0, 0, 0, 0, length - len(tensor))).transpose(0, 1)[None]


@cache
def _kernel(compiled: bool) -> Callable[..., Tensor]:
    _allow_many_lengths()
    return compiled_kernel() if compiled else cast("Callable[..., Tensor]", flex_attention)


def compiled_kernel(backend: Any = "inductor") -> Callable[..., Tensor]:
    """FlexAttention for static lengths, compiled by one of torch.compile's backends at the first call of each."""
    kernel: Callable[..., Any] = torch.compile(flex_attention, backend=backend, dynamic=False, fullgraph=True)
    return kernel


def _allow_many_lengths() -> None:
    """Beyond torch's limit a new pair of lengths would be an error, or (in other versions) every pair of the pack."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILED_LENGTHS)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * COMPILED_LENGTHS)
