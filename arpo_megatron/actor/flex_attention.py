"""Tree attention on CUDA: one FlexAttention call per layer, with a block mask made on the CPU from subtree intervals.

Query q attends to key k iff k <= q < key_end[k]. The kernel works on blocks of 128 queries by 128 keys; each block is
full (all pairs attend), partial or empty. Evaluating every pair would cost n^2. Instead, two numbers per block decide:
of a query block, its smallest and largest position and its first position at or after a key block's start; of a key
block, the smallest and largest `key_end`.

    full   every key is at or before the first query, and every key's subtree reaches past the last query
    empty  no query is at or after the block's start, or the first such query is past every subtree of the block

Both tests are exact for any ascending list of queries: a whole pack, a pack with inherited keys, or the query blocks of
one context-parallel rank.

Lengths are padded to a few pairs of sizes because the kernel is compiled once per pair; ranks of a machine share the
compiler's cache. Blocks of padding are empty and skipped; padded rows of the output are zeros.
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

from arpo_megatron.actor.parallel import move
from arpo_megatron.config import AttentionBackend
from arpo_megatron.packing.layout import ATTENTION_BLOCK, padded_lengths

COMPILED_LENGTHS = 256
"""Largest number of compiled kernels: one per pair of padded lengths, with and without gradient."""

_BLOCKS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)
"""Tensors of a block mask."""

_Positions = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """The call for one pack, or for the queries of one context-parallel rank."""

    queries: int
    keys: int
    mask: BlockMask | None
    """Block mask of padded lengths, on the device of the tensors; None without queries."""
    full_blocks: int
    """Number of blocks in which all pairs attend."""
    partial_blocks: int
    """Number of blocks in which some pairs attend."""

    @property
    def pairs(self) -> int:
        """Number of query-key pairs computed, masked pairs included."""
        return (self.full_blocks + self.partial_blocks) * ATTENTION_BLOCK**2


def block_classes(key_end: _Positions, query_positions: _Positions) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Classify the blocks of a mask.

    Args:
        key_end: int[n], one past the last position of each key's subtree (above its own position).
        query_positions: int[q], ascending, q > 0.

    Returns:
        The full and the partial blocks, bool[query blocks, key blocks] of the padded lengths; all others are empty.
    """
    n, q = len(key_end), len(query_positions)
    rows, columns = (length // ATTENTION_BLOCK for length in padded_lengths(q, n))
    starts = np.arange(columns) * ATTENTION_BLOCK
    # Padding keys belong to no subtree; padding queries stand at -1, before every key.
    end = np.zeros(columns * ATTENTION_BLOCK, np.int64)
    end[:n] = key_end
    last_end, first_end = end.reshape(columns, ATTENTION_BLOCK).max(1), end.reshape(columns, ATTENTION_BLOCK).min(1)
    position = np.full(rows * ATTENTION_BLOCK, -1, np.int64)
    position[:q] = query_positions
    by_block = position.reshape(rows, ATTENTION_BLOCK)
    lowest, highest = by_block.min(1)[:, None], by_block.max(1)[:, None]
    full = (starts + ATTENTION_BLOCK - 1 <= lowest) & (highest < first_end)
    # The first query of each block that is not before the key block's start.
    first = np.maximum(np.searchsorted(position[:q], starts)[None], np.arange(rows)[:, None] * ATTENTION_BLOCK)
    there = first < np.minimum(np.arange(1, rows + 1) * ATTENTION_BLOCK, q)[:, None]
    some = there & (last_end > position[np.minimum(first, q - 1)])
    return full, some & ~full


def flex_plan(key_end: _Positions, query_positions: _Positions, device: torch.device | str = "cpu") -> FlexPlan:
    """Make the block mask of some queries over the keys of a pack.

    Args:
        key_end: int32[n], one past the last position of each key's subtree.
        query_positions: int32[q], ascending positions among the keys.
        device: device of queries, keys and values.

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
    lengths = (full.shape[0] * ATTENTION_BLOCK, full.shape[1] * ATTENTION_BLOCK)
    position = torch.full((lengths[0],), -1, dtype=torch.int32)
    position[:q] = torch.from_numpy(query_positions.astype(np.int32))
    end = torch.zeros(lengths[1], dtype=torch.int32)
    end[:n] = torch.from_numpy(key_end.astype(np.int32))
    # Made on the CPU, so that no kernel is launched for it; then moved, without a wait.
    mask = BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=ATTENTION_BLOCK,
        mask_mod=_mask_mod(move(position, device), move(end, device)),
        seq_lengths=lengths,
    )
    for name in _BLOCKS:
        setattr(mask, name, move(getattr(mask, name), device))
    return FlexPlan(q, n, mask, int(full.sum()), int(partial.sum()))


def _ordered(blocks: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """List the marked key blocks of each query block.

    Returns:
        Their number, int32[1, 1, rows], and the indices of all key blocks, marked ones first and ascending,
        int32[1, 1, rows, columns].
    """
    counts = torch.from_numpy(blocks.sum(1).astype(np.int32))
    indices = torch.from_numpy(np.argsort(~blocks, axis=1, kind="stable").astype(np.int32))
    return counts[None, None], indices[None, None]


def _mask_mod(position: Tensor, end: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def attends(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= position[query]) & (position[query] < end[key])

    return attends


def kernel_options(backend: AttentionBackend) -> dict[str, Any] | None:
    """Return torch's options of the kernels (`FlexKernelOptions`); None leaves the choice to torch."""
    return {"BACKEND": "FLASH"} if backend == "flash" else None


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: FlexPlan, scale: float, backend: AttentionBackend = "auto"
) -> Tensor:
    """Compute attention of one pack under its tree mask.

    On a CPU this has no gradient and computes every pair: for tests only.

    Args:
        query: [q, heads, head_dim], the plan's queries, then padding.
        key: [n, groups, head_dim], all keys of the plan; heads is a multiple of groups.
        value: [n, groups, head_dim].
        plan: from `flex_plan`, on the same device.
        scale: factor of the scores.
        backend: `model.attention_backend`.

    Returns:
        [q, heads, head_dim] in the dtype of `query`; zeros for padding.
    """
    if plan.mask is None:
        # Zeros that depend on all three, as in attention.py.
        return 0.0 * (query + key[:1].sum() + value[:1].sum())
    query_length, key_length = plan.mask.shape[-2:]
    output: Tensor = _kernel(query.is_cuda)(
        _padded(query[: plan.queries], query_length),
        _padded(key, key_length),
        _padded(value, key_length),
        block_mask=plan.mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=kernel_options(backend),
    )
    result = output.squeeze(0).transpose(0, 1)[: len(query)]
    return result if len(result) == len(query) else pad(result, (0, 0, 0, 0, 0, len(query) - len(result)))


def _padded(tensor: Tensor, length: int) -> Tensor:
    """Zero-pad [tokens, heads, dim] to [1, heads, length, dim]."""
    return pad(tensor, (0, 0, 0, 0, 0, length - len(tensor))).transpose(0, 1)[None]


@cache
def _kernel(compiled: bool) -> Callable[..., Tensor]:
    _allow_many_lengths()
    return compiled_kernel() if compiled else cast("Callable[..., Tensor]", flex_attention)


def compiled_kernel(backend: Any = "inductor") -> Callable[..., Tensor]:
    """Return FlexAttention for static lengths; torch.compile's `backend` compiles it at the first call of each
    length."""
    kernel: Callable[..., Any] = torch.compile(flex_attention, backend=backend, dynamic=False, fullgraph=True)
    return kernel


def _allow_many_lengths() -> None:
    """Raise torch's limits of recompilation; past them a new pair of lengths is an error or runs uncompiled."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILED_LENGTHS)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * COMPILED_LENGTHS)
