"""Matrix products: FP8 operands are converted to float32, multiplied, and rounded to the output's dtype.

Assert what cuBLAS needs on Hopper: both FP8 operands lie in memory with the contraction last, so a transposed one
needs its copy by columns; contractions are multiples of 16 and rows of 8; blockwise operands are not both 128 x 128.
TE's source: pytorch/csrc/extensions/gemm.cpp.
"""

from typing import Any

import torch
from torch import Tensor

from arpo_megatron.hardware.onednn import product
from arpo_megatron.hardware.te_emulation.dtypes import TORCH_DTYPES, DType, Float8BlockScaleTensorFormat
from arpo_megatron.hardware.te_emulation.quantization import BLOCK, from_fp8

_OUTPUTS = (torch.bfloat16, torch.float32, torch.float16)
Quantized = Any
"""TE's FP8 tensor or storage."""


def generic_gemm(
    a: Tensor | Quantized,
    transposed_a: bool,
    b: Tensor | Quantized,
    transposed_b: bool,
    out: Tensor | None,
    quantizer: Any,
    kind: int | None,
    bias: Tensor | None,
    bias_kind: int,
    gelu: bool,
    gelu_in: Tensor | None,
    gradient: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    split_accumulator: bool,
    *,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """Multiply as `tex.generic_gemm` does: op(b) @ op(a) for matrices in rows.

    Returns:
        The product, the gradient of the bias (with `gradient` and `bias`), and two values that stay None here.
    """
    assert comm_overlap is None and not gelu and alpha == 1.0, "not emulated: overlap, GELU, alpha"
    _check_pair(a, b, split_accumulator)
    right = contraction_last(a, columns=not transposed_a)
    left = contraction_last(b, columns=transposed_b)
    result = product(left, right)
    bias_gradient = None
    if bias is not None and bias.numel():
        if gradient:
            bias_gradient = left.sum(1).to(bias.dtype)
        else:
            result = result + bias.float()
    if not transposed_b:
        result = result.view(*b.size()[:-1], result.shape[-1])
    if out is not None:
        _store(out, result, accumulate)
        return out, bias_gradient, gelu_in, extra_output
    assert not accumulate, "a product accumulates into an output"
    result = result.to(TORCH_DTYPES[DType(kind)] if kind is not None else a.dtype)
    return (result if quantizer is None else quantizer(result)), bias_gradient, gelu_in, extra_output


def te_general_grouped_gemm(
    a: list[Any],
    transposed_a: bool,
    b: list[Any],
    transposed_b: bool,
    out: list[Tensor],
    kind: int,
    splits: list[int],
    bias: list[Tensor],
    bias_kind: int,
    single_output: bool,
    pre_gelu: list[Tensor],
    gradient: bool,
    workspaces: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    split_accumulator: bool,
    sm_count: int,
) -> list[Tensor]:
    """Multiply pairs of matrices (`tex.te_general_grouped_gemm`); with `single_output` they fill runs of rows of
    `out[0]`."""
    assert not any(each.numel() for each in bias), "not emulated: biases of experts"
    start = 0
    for index, (weight, values) in enumerate(zip(a, b, strict=True)):
        _check_pair(weight, values, split_accumulator)
        result = product(
            contraction_last(values, columns=transposed_b), contraction_last(weight, columns=not transposed_a)
        )
        if single_output:
            rows = out[0].view(-1, out[0].shape[-1])[start : start + len(result)]
            start += len(result)
        else:
            rows = out[index]
        _store(rows, result, accumulate)
    return bias


def contraction_last(operand: Tensor | Quantized, *, columns: bool) -> Tensor:
    """Return an operand as float32 matrix whose last dimension the product sums over.

    Args:
        operand: [..., k], a tensor or TE's FP8 tensor.
        columns: the product sums over the rows; an FP8 operand needs its copy by columns for that.
    """
    if isinstance(operand, Tensor) and not hasattr(operand, "_fp8_dtype"):
        matrix = operand.reshape(-1, operand.shape[-1]).float()
        return matrix.t().contiguous() if columns else matrix
    matrix = _blockwise(operand, columns) if _is_blockwise(operand) else _scaled(operand, columns)
    rows, contraction = matrix.shape
    assert contraction % 16 == 0 and rows % 8 == 0, f"FP8 operand [{rows}, {contraction}]: multiples of 8 and 16"
    return matrix


def _is_blockwise(operand: Tensor | Quantized) -> bool:
    return hasattr(operand, "_is_2D_scaled")


def _check_pair(a: Any, b: Any, split_accumulator: bool) -> None:
    if not (_is_blockwise(a) or _is_blockwise(b)):
        assert hasattr(a, "_fp8_dtype") == hasattr(b, "_fp8_dtype"), "one operand is FP8, the other is not"
        return
    assert _is_blockwise(a) and _is_blockwise(b), "one operand is blockwise FP8, the other is not"
    assert not (a._is_2D_scaled and b._is_2D_scaled), "both operands have 128 x 128 blocks"
    assert split_accumulator, "blockwise products need the split accumulator"


def _blockwise(operand: Quantized, columns: bool) -> Tensor:
    """Return the values of a blockwise tensor, from the copy by columns or by rows."""
    assert operand._data_format == Float8BlockScaleTensorFormat.GEMM_READY, "a product needs data in GEMM format"
    if columns:
        data, scales = operand._columnwise_data, operand._columnwise_scale_inv
        assert data is not None, "the product needs the copy by columns"
        data = data.reshape(data.shape[0], -1)
    else:
        data, scales = operand._rowwise_data, operand._rowwise_scale_inv
        assert data is not None, "the product needs the copy by rows"
        data = data.reshape(-1, data.shape[-1])
    assert data.is_contiguous(), "FP8 data must be contiguous"
    rows, contraction = data.shape
    by_row = scales.repeat_interleave(BLOCK, 0) if operand._is_2D_scaled else scales.t()
    each = by_row[:rows, : -(-contraction // BLOCK)].repeat_interleave(BLOCK, 1)[:, :contraction]
    values: Tensor = from_fp8(data, operand._fp8_dtype) * each
    return values


def _scaled(operand: Quantized, columns: bool) -> Tensor:
    """Return the values of a tensor with one scale, from its transpose or from its data."""
    if columns:
        data = operand._transpose
        assert data is not None and not operand._transpose_invalid, "the product needs the transposed FP8 data"
        data = data.reshape(data.shape[0], -1)
    else:
        data = operand._data
        assert data is not None, "the product needs the FP8 data"
        data = data.reshape(-1, data.shape[-1])
    assert data.is_contiguous(), "FP8 data must be contiguous"
    values: Tensor = from_fp8(data, operand._fp8_dtype) * operand._scale_inv
    return values


def _store(out: Tensor, result: Tensor, accumulate: bool) -> None:
    assert out.dtype in _OUTPUTS and out.is_contiguous(), f"output {out.dtype}, stride {out.stride()}"
    if accumulate:
        out.add_(result.view_as(out))
    else:
        out.copy_(result.view_as(out))
