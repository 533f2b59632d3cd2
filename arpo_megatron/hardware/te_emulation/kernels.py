"""The other kernels that our models call: RMSNorm, rotary positions, rows of experts, and steps over many tensors.

Named and called as in `transformer_engine_torch`, except for the permutations, which TE's Python has as Triton kernels
(transformer_engine/pytorch/triton/permutation.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from arpo_megatron.hardware.te_emulation.dtypes import TORCH_DTYPES, DType


def rmsnorm_fwd(
    values: Tensor,
    weight: Tensor,
    epsilon: float,
    out: Any,
    quantizer: Any,
    kind: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, Tensor]:
    """Normalise the rows of [n, k]; return them (quantized, if a quantizer is given) and float32[n] inverse RMS."""
    assert values.dim() == 2 and values.is_contiguous() and out is None, "rmsnorm_fwd: a contiguous matrix"
    exact = values.float()
    inverse = torch.rsqrt(exact.square().mean(-1) + epsilon)
    normed = (exact * inverse[:, None] * (weight.float() + zero_centered_gamma)).to(TORCH_DTYPES[DType(kind)])
    return (normed if quantizer is None else quantizer(normed)), None, inverse


def rmsnorm_bwd(
    gradient: Tensor, values: Tensor, inverse: Tensor, weight: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `rmsnorm_fwd` for the values and the weight."""
    assert gradient.is_contiguous() and gradient.dtype == values.dtype, f"rmsnorm_bwd: {gradient.dtype}"
    given = gradient.float().view(values.shape)
    normed = values.float() * inverse[:, None]
    scaled = given * (weight.float() + zero_centered_gamma)
    found = inverse[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return found.to(gradient.dtype), (given * normed).sum(0).to(weight.dtype)


def fused_rope_forward(
    values: Tensor,
    angles: Tensor,
    start_positions: Tensor | None,
    layout: Any,
    interleaved: bool,
    cumulative: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Rotate [n, batch, heads, k] by float32[n, 1, 1, k] angles, one row of them per token."""
    sine, cosine = _rotation(values, angles, interleaved, cp_size)
    exact = values.float()
    return (exact * cosine + _half_turn(exact) * sine).to(values.dtype)


def fused_rope_backward(
    gradient: Tensor,
    angles: Tensor,
    start_positions: Tensor | None,
    layout: Any,
    interleaved: bool,
    cumulative: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Return the gradient of `fused_rope_forward`: the rotation back."""
    sine, cosine = _rotation(gradient, angles, interleaved, cp_size)
    exact = gradient.float()
    return (exact * cosine - _half_turn(exact * sine)).to(gradient.dtype)


def _rotation(values: Tensor, angles: Tensor, interleaved: bool, cp_size: int) -> tuple[Tensor, Tensor]:
    assert angles.shape[1:3] == (1, 1) and angles.dtype == torch.float32, f"angles {angles.shape} {angles.dtype}"
    assert values.dim() == 4 and not interleaved and cp_size == 1, "not emulated: interleaved or divided angles"
    assert len(values) <= len(angles), f"{len(values)} tokens, {len(angles)} angles"
    used = angles[: len(values)]
    return used.sin(), used.cos()


def _half_turn(values: Tensor) -> Tensor:
    first, second = values.chunk(2, -1)
    return torch.cat([-second, first], -1)


def fused_multi_row_padding(values: Tensor, out: Tensor, rows: Sequence[int], padded: Sequence[int]) -> None:
    """Copy runs of rows into longer runs, filled with zeros."""
    for source, target, count in zip(values.split(list(rows)), out.split(list(padded)), rows, strict=True):
        target[:count].copy_(source)
        target[count:].zero_()


def fused_multi_row_unpadding(values: Tensor, out: Tensor, padded: Sequence[int], rows: Sequence[int]) -> None:
    """Copy the beginnings of runs of rows into shorter runs."""
    for source, target, count in zip(values.split(list(padded)), out.split(list(rows)), rows, strict=True):
        target.copy_(source[:count])


def multi_tensor_l2norm(
    chunk: int, flag: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return float32[1], the norm over all tensors, and float32[n], the norms of each if asked for."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else norms.new_zeros(0)


def multi_tensor_scale(chunk: int, flag: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    """Write `scale` times the first list to the second."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_adam(
    chunk: int,
    flag: Tensor,
    lists: Sequence[Sequence[Tensor]],
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Take a step of Adam (mode 0: decay in the gradient) or AdamW (mode 1).

    Args:
        lists: gradients, weights and both moments; float32 master weights, if there are any, come fifth.
    """
    first = 1 - beta1**step if bias_correction else 1.0
    second = 1 - beta2**step if bias_correction else 1.0
    for gradient, weight, moment, square, *master in zip(*lists, strict=True):
        exact = master[0] if master else weight
        given = gradient.float()
        if mode == 0:
            given = given + weight_decay * exact
        moment.mul_(beta1).add_(given, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(given, given, value=1 - beta2)
        update = (moment / first) / ((square / second).sqrt() + epsilon)
        if mode == 1:
            update = update + weight_decay * exact
        exact.sub_(rate * update)
        if master:
            weight.copy_(exact)


def make_row_id_map(routing_map: Tensor, tokens: int, experts: int) -> Tensor:
    """Return int32[tokens, 2 * experts + 1]: the row of each token for each expert, -1 for none; the rest is unused.

    Rows are ordered by expert, then by token.
    """
    chosen = routing_map.bool()
    rows = (chosen.t().reshape(-1).cumsum(0) - 1).view(experts, tokens).t()
    ids = torch.full((tokens, 2 * experts + 1), -1, dtype=torch.int32)
    ids[:, :experts] = rows.where(chosen, -1)
    return ids


def _pairs(row_id_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return token, expert and row of every routed pair, ordered by token."""
    ids = row_id_map[:, : row_id_map.shape[1] // 2]
    tokens, experts = (ids >= 0).nonzero(as_tuple=True)
    return tokens, experts, ids[tokens, experts].long()


def permute_with_mask_map(
    values: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    tokens: int,
    experts: int,
    rows: int,
    hidden: int,
    scale_hidden: int | None,
) -> tuple[Tensor, None, Tensor | None]:
    """Copy [tokens, hidden] to the rows of the experts, [rows, hidden], and their probabilities to [rows]."""
    assert scale is None, "not emulated: permuting FP8 tokens"
    token, expert, row = _pairs(row_id_map)
    out = values.new_zeros(rows, hidden)
    out[row] = values[token]
    if probs is None:
        return out, None, None
    permuted = probs.new_zeros(rows)
    permuted[row] = probs[token, expert]
    return out, None, permuted


def unpermute_with_mask_map(
    values: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    tokens: int,
    experts: int,
    hidden: int,
) -> tuple[Tensor, Tensor | None]:
    """Sum the experts' rows of each token in float32 and in one order, and undo the permutation of probabilities."""
    token, expert, row = _pairs(row_id_map)
    parts = values[row].float()
    if merging_probs is not None:
        parts = parts * merging_probs[token, expert, None].float()
    out = parts.new_zeros(tokens, hidden).index_add_(0, token, parts).to(values.dtype)
    if permuted_probs is None:
        return out, None
    probs = permuted_probs.new_zeros(tokens, experts)
    probs[token, expert] = permuted_probs[row]
    return out, probs


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, tokens: int, splits: int) -> Tensor:
    """Return int32[tokens]: the row to which each row moves when runs of rows are ordered by `sorted_indices`."""
    runs = torch.arange(tokens, dtype=torch.int32).split(split_sizes.tolist())
    source = torch.cat([runs[index] for index in sorted_indices.tolist()]).long()
    target = torch.empty(tokens, dtype=torch.int32)
    target[source] = torch.arange(tokens, dtype=torch.int32)
    return target


def sort_chunks_by_map(
    values: Tensor, row_id_map: Tensor, probs: Tensor | None, tokens: int, hidden: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """Move rows to the places of `make_chunk_sort_map`, or back."""
    target = row_id_map.long()
    source = torch.argsort(target) if is_forward else target
    return values[source], None if probs is None else probs[source]
