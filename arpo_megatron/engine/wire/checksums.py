"""Checksums of tensors that add up over the pieces of a tensor.

An element contributes its bits, read as an integer, times 2 * (its index in the whole tensor) + 1, modulo 2^64. The
sums over pieces therefore add up to the sum over the whole tensor: a trainer with the whole tensor and an engine with
pieces of it on several ranks get the same number. A single wrong element always changes it, because its factor is odd.
Two different elements in each other's place change it, too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

CHECKSUM_ACTION = "arpo-checksums:"
"""Prefix of the action with which SGLang's weight checker computes checksums; JSON follows. A rank answers a digest."""
PIECES_ACTION = "arpo-checksum-pieces"
"""Action that asks each rank for the checksums that it has computed last."""
RECEIVED_ACTION = "arpo-received"
"""Action that asks each rank for figures of its last exchange."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = 2**64 - 1
_CHUNK = {"cpu": 2**18, "cuda": 2**20}
"""Elements that are summed at a time, which as int64 (2 or 8 MiB) stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class ChecksummedPart:
    """A part of a tensor, as the trainer or an engine's rank holds it."""

    offset: int
    """Index of its first element in the whole tensor."""
    sizes: tuple[int, ...]
    """Its shape."""
    strides: tuple[int, ...]
    """Elements of the whole tensor that a step along each dimension moves by."""
    checksum: int
    """Checksum of its elements, 64 bits."""

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Self:
        """Return the object whose `as_json` gave `data`."""
        offset, sizes, strides, checksum = data
        return cls(offset, tuple(sizes), tuple(strides), checksum)

    def as_json(self) -> list[Any]:
        """Return the fields as JSON-safe values."""
        return [self.offset, self.sizes, self.strides, self.checksum]


def checksummed(held: Sequence[tuple[Tensor, Tensor]]) -> list[ChecksummedPart]:
    """Return the parts `held`, each as its values and a view (same shape) that has their place in the whole tensor."""
    if not held:
        return []
    totals = torch.stack([checksum(values, view) for values, view in held]).tolist()  # waits for the device once
    return [
        ChecksummedPart(int(view.storage_offset()), tuple(view.shape), view.stride(), total & _MASK)
        for (_, view), total in zip(held, totals, strict=True)
    ]


def checksum(values: Tensor, view: Tensor) -> Tensor:
    """Return the checksum of a part as int64[], on the device of the values; see `checksummed`.

    It consists of sums along each dimension, because the index in the whole tensor is linear in them.
    """
    offset, strides = int(view.storage_offset()), view.stride()
    bits = values.detach().view(_INTEGERS[values.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)  # int64 is arithmetic modulo 2^64
    rows = max(1, _CHUNK[bits.device.type] // max(1, prod(bits.shape[1:])))
    for first in range(0, len(bits), rows):
        chunk = bits[first : first + rows].to(torch.int64)
        for dim, stride in enumerate(strides):
            others = [other for other in range(chunk.dim()) if other != dim]
            sums = chunk.sum(others) if others else chunk
            factors = torch.arange(len(sums), device=sums.device) * (2 * stride)
            if dim == 0:
                factors += 2 * (offset + first * stride) + 1
            total += (sums * factors).sum()
    return total


def difference(pieces: Iterable[ChecksummedPart], expected: int, elements: int) -> str | None:
    """Compare an engine's pieces of a tensor with the `expected` checksum; return the difference, or None.

    Several ranks may hold the same piece (if there are fewer key/value heads than ranks), but it must be equal.

    Args:
        pieces: the pieces of all ranks.
        expected: checksum of the whole tensor.
        elements: number of elements of the whole tensor.
    """
    distinct: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    for piece in pieces:
        if distinct.setdefault((piece.offset, piece.sizes, piece.strides), piece.checksum) != piece.checksum:
            return "two of its ranks hold different copies of one piece"
    held = sum(prod(sizes) for _, sizes, _ in distinct)
    if held != elements:
        return f"it holds {held} of {elements} elements"
    total = sum(distinct.values()) & _MASK
    return None if total == expected else f"checksum {total:016x} instead of {expected:016x}"
