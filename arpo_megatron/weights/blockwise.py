"""FP8 weights with a scale for each block of 128 x 128, as engines hold them.

A scale is the smallest power of two that brings the block's values into the range of float8_e4m3fn: the rule, and the
bits, of SGLang's `per_block_cast_to_fp8` (from DeepGEMM). A tensor NAME is pushed as two: NAME in float8, and
NAME_scale_inv in float32, by whose values the engine multiplies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from arpo_megatron.hardware.fp8 import BLOCK
from arpo_megatron.models.mapping import Entry

SCALES = "_scale_inv"
"""End of the name of a tensor's scales, as in quantized models on the Hugging Face hub."""
FP8 = torch.float8_e4m3fn

_SMALLEST = 1e-4
"""Least magnitude that a block's scale is made for."""
_MANTISSA, _EXPONENT = 0x007FFFFF, 0x7F800000
_SLAB = 2**22
"""Elements that are quantized at a time: products in float32 take four times the memory of the result."""


def with_scales(table: Sequence[Entry]) -> list[Entry]:
    """Return the table with an entry of scales after that of each matrix product."""
    return [each for entry in table for each in ((entry, _scales_of(entry)) if entry.product else (entry,))]


def quantized(weight: Tensor) -> Tensor:
    """Return weights [rows, columns], both multiples of 128, as float8 of the same shape."""
    found = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    for part, target in zip(_slabs(weight), _slabs(found), strict=True):
        blocks = _blocks(part)
        target.copy_((blocks * (1.0 / _scales(blocks))).to(FP8).view(part.shape))
    return found


def block_scales(weight: Tensor) -> Tensor:
    """Return the scales of weights [rows, columns] as float32[rows / 128, columns / 128]."""
    return torch.cat([_scales(_blocks(part))[:, 0, :, 0] for part in _slabs(weight)])


def _scales_of(entry: Entry) -> Entry:
    return replace(
        entry,
        hf={name + SCALES: (-(-rows // BLOCK), -(-columns // BLOCK)) for name, (rows, columns) in entry.hf.items()},
        product=False,
    )


def slab_rows(columns: int) -> int:
    """Return the number of rows with that many columns that are quantized at a time."""
    return max(1, _SLAB // (BLOCK * columns)) * BLOCK


def _slabs(weight: Tensor) -> Iterator[Tensor]:
    return iter(weight.split(slab_rows(weight.shape[1])))


def _blocks(weight: Tensor) -> Tensor:
    """[rows, columns] -> [rows / 128, 128, columns / 128, 128]"""
    rows, columns = weight.shape
    return weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)


def _scales(blocks: Tensor) -> Tensor:
    largest = blocks.abs().amax((1, 3), keepdim=True).float().clamp(_SMALLEST)
    bits = (largest / torch.finfo(FP8).max).view(torch.int32)
    return ((bits + _MANTISSA) & _EXPONENT).view(torch.float32)  # rounds up to a power of two
