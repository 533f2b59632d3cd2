"""Quantization kernels: FP8 bytes and scales of tensors, with one scale per tensor or one per block.

TE's source: common/recipe/recipe_common.cuh (`compute_scale_from_amax`), pytorch/csrc/quantizer.cpp. A quantizer is an
object of TE's Python; the C++ extension reads the same attributes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from arpo_megatron.hardware.te_emulation.dtypes import LARGEST, TORCH_DTYPES, DType

BLOCK = 128
"""Values along the contraction that share a scale in the blockwise recipe."""
_EXPONENT_AND_SIGN = -(2**23)
"""The bits of a float32 above its mantissa, as int32."""
_SOURCES = (torch.float32, torch.bfloat16, torch.float16)


def scale_of(amax: Tensor, kind: DType, epsilon: float, *, power_of_two: bool) -> Tensor:
    """Return the factor that makes `amax` the largest value of the FP8 format.

    Args:
        amax: float32, largest absolute value of each group.
        kind: the FP8 format.
        epsilon: smallest `amax`.
        power_of_two: round the factor down to a power of two, so that scaling is exact.
    """
    amax = amax.clamp(min=epsilon)
    scale = (LARGEST[kind] / amax).nan_to_num(posinf=torch.finfo(torch.float32).max)
    scale = scale.where((amax > 0) & amax.isfinite(), 1.0)
    return (scale.view(torch.int32) & _EXPONENT_AND_SIGN).view(torch.float32) if power_of_two else scale


def to_fp8(values: Tensor, kind: DType) -> Tensor:
    """Round to FP8 bytes (uint8); values beyond the largest saturate."""
    return values.clamp(-LARGEST[kind], LARGEST[kind]).to(TORCH_DTYPES[kind]).view(torch.uint8)


def from_fp8(data: Tensor, kind: DType) -> Tensor:
    """Return FP8 bytes as float32, without their scale."""
    values: Tensor = data.view(TORCH_DTYPES[kind]).float()
    return values


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Quantize a tensor (`tex.quantize`).

    Args:
        tensor: float32, bfloat16 or float16 of any shape.
        quantizer: TE's quantizer, which names the format, the recipe, and the copies to make: by rows, by columns.
        output: the quantized tensor to overwrite; None makes one.
        noop: float32[1]; if it is not 0, `output` is left as it is.
    """
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    assert tensor.dtype in _SOURCES, f"quantize: {tensor.dtype}"
    if noop is not None and noop.item():
        return output
    if output is None:
        output = _empty(tensor, quantizer)
    source = tensor.detach().float().reshape(-1, tensor.shape[-1])
    if isinstance(quantizer, Float8BlockQuantizer):
        _fill_blockwise(source, quantizer, output)
    else:
        _fill_scaled(source, quantizer, output)
    return output


def split_quantize(tensor: Tensor, sections: list[int], quantizers: list[Any]) -> list[Any]:
    """Quantize runs of rows separately (`tex.split_quantize`)."""
    return [quantize(part, quantizer) for part, quantizer in zip(tensor.split(sections), quantizers, strict=True)]


def bgrad_quantize(tensor: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Return the sum of all rows, which is the gradient of a bias, and the quantized tensor (`tex.bgrad_quantize`)."""
    return tensor.float().reshape(-1, tensor.shape[-1]).sum(0).to(tensor.dtype), quantize(tensor, quantizer)


def dequantize(tensor: Any, kind: int) -> Tensor:
    """Return the values of a quantized tensor in format `kind` (`tex.dequantize`)."""
    values: Tensor = from_fp8(tensor._data, tensor._fp8_dtype) * tensor._scale_inv
    return values.to(TORCH_DTYPES[DType(kind)])


def fp8_transpose(data: Tensor, kind: int, *, out: Tensor | None = None) -> Tensor:
    """Return FP8 bytes with the last dimension first (`tex.fp8_transpose`)."""
    assert data.is_contiguous() and data.dtype == torch.uint8, f"fp8_transpose: {data.dtype}, stride {data.stride()}"
    turned = data.movedim(-1, 0).contiguous()
    return turned if out is None else out.copy_(turned)


def _empty(tensor: Tensor, quantizer: Any) -> Any:
    """Return an uninitialised tensor of the quantizer's recipe, or its storage alone if the quantizer is internal."""
    made = quantizer.make_empty(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)
    if not quantizer.internal:
        return made
    storage = next(base for base in type(made).__mro__ if base.__name__.endswith("Storage"))
    return storage(**made.get_metadata())


def _fill_scaled(source: Tensor, quantizer: Any, output: Any) -> None:
    """Quantize with one scale, that of the values (current scaling)."""
    quantizer.amax.fill_(source.abs().amax() if source.numel() else 0.0)
    if quantizer.with_amax_reduction:
        dist.all_reduce(quantizer.amax, dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    quantizer.scale.copy_(
        scale_of(quantizer.amax, quantizer.dtype, quantizer.amax_epsilon, power_of_two=quantizer.force_pow_2_scales)
    )
    data = to_fp8(source * quantizer.scale, quantizer.dtype)
    if output._data is not None:
        output._data.copy_(data.view(output._data.shape))
    if output._transpose is not None:
        output._transpose.copy_(data.t().reshape(output._transpose.shape))
        output._transpose_invalid = False
    output._scale_inv.copy_(1 / quantizer.scale)


def _fill_blockwise(source: Tensor, quantizer: Any, output: Any) -> None:
    """Quantize in blocks: 128 x 128 (weights), or 128 values along the contraction (activations and gradients).

    The copy by columns is the transposed matrix, except before an all-gather (compact format), which joins rows.
    """
    square, compact = quantizer.block_scaling_dim == 2, quantizer.all_gather_usage
    if output._rowwise_data is not None:
        data, inverse = _blocks(source, quantizer, BLOCK if square else 1, BLOCK)
        output._rowwise_data.copy_(data.view(output._rowwise_data.shape))
        _place(output._rowwise_scale_inv, inverse if square or compact else inverse.t())
    if output._columnwise_data is not None:
        data, inverse = _blocks(source, quantizer, BLOCK, BLOCK if square else 1)
        turned = data if compact and not square else data.t()
        output._columnwise_data.copy_(turned.reshape(output._columnwise_data.shape))
        _place(output._columnwise_scale_inv, inverse.t() if square else inverse)


def _blocks(source: Tensor, quantizer: Any, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Quantize [m, k] in blocks of [rows, columns]; return uint8[m, k] and one inverse scale per block."""
    m, k = source.shape
    padded = pad(source, (0, -k % columns, 0, -m % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale = scale_of(
        blocks.abs().amax((1, 3)), quantizer.dtype, quantizer.amax_epsilon, power_of_two=quantizer.force_pow_2_scales
    )
    data = to_fp8(blocks * scale[:, None, :, None], quantizer.dtype)
    return data.view(padded.shape)[:m, :k], 1 / scale


def _place(target: Tensor, scales: Tensor) -> None:
    """Copy scales into an array that may be padded for the products."""
    target.zero_()
    target[: scales.shape[0], : scales.shape[1]].copy_(scales)
