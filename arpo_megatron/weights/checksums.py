"""Checksums of tensors that do not depend on how a tensor is cut up.

An element counts as its bits, taken as an integer, times 2 * (its place in the whole tensor) + 1, modulo 2^64. Sums
over pieces therefore add up to the sum over the whole: a trainer that has the whole tensor and an engine whose ranks
hold pieces of it, fused with others, come to the same number. A single wrong element always changes it, since its
factor is odd; so does any two elements in each other's place.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

CHECKSUM_ACTION = "arpo-checksums:"
"""Begins the action of SGLang's weight checker that asks for them; JSON follows."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that someone holds.

    Attributes:
        offset: place of its first element in the whole tensor, in elements.
        sizes: its shape.
        strides: what a step along each dimension means in the whole tensor, in elements.
        checksum: of its elements, 64 bits.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    checksum: int

    @classmethod
    def of(cls, values: Tensor, place: Tensor) -> Self:
        """The piece `values`, which lies in the whole tensor as the view `place` does (same shape)."""
        offset, strides = int(place.storage_offset()), place.stride()
        return cls(offset, tuple(place.shape), strides, _checksum(values, offset, strides))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """From what `as_json` made."""
        return cls(data["offset"], tuple(data["sizes"]), tuple(data["strides"]), data["checksum"])

    def as_json(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self)


def checksum(tensor: Tensor) -> int:
    """Of a whole contiguous tensor on any device."""
    return _checksum(tensor, 0, tensor.stride())


def difference(pieces: Iterable[Piece], sizes: Sequence[int], expected: int) -> str | None:
    """What is wrong with the pieces that an engine holds of a tensor of shape `sizes`; None: nothing.

    Ranks may hold the same piece (key/value heads that are fewer than ranks); then all of them must agree.
    """
    found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    for piece in pieces:
        if found.setdefault((piece.offset, piece.sizes, piece.strides), piece.checksum) != piece.checksum:
            return "two of its ranks hold different copies of one part"
    count = sum(prod(size) for _, size, _ in found)
    if count != prod(sizes):
        return f"it holds {count} of {prod(sizes)} elements"
    total = sum(found.values()) & _MASK
    return None if total == expected else f"checksum {total:016x} instead of {expected:016x}"


def _checksum(tensor: Tensor, offset: int, strides: Sequence[int]) -> int:
    """Sum of bits * (2 * place + 1), from the sums along each dimension: the place is linear in the indices."""
    bits = tensor.detach().view(_INTEGERS[tensor.dtype.itemsize])
    dims = range(bits.dim())
    total = 0
    for dim, stride in zip(dims, strides, strict=True):
        others = [other for other in dims if other != dim]
        sums = bits.sum(others, dtype=torch.int64) if others else bits.to(torch.int64)
        if not dim:
            total += (2 * offset + 1) * int(sums.sum())
        index = torch.arange(len(sums), device=sums.device)
        total += 2 * stride * int((sums * index).sum())
    return total & _MASK
