"""Checksums of tensors that add up over the pieces of a tensor.

An element contributes its bits, read as an integer, times 2 * (its index in the whole tensor) + 1, modulo 2^64. The
sums over pieces therefore add up to the sum over the whole tensor: a trainer with the whole tensor and an engine with
pieces of it on several ranks get the same number. A single wrong element always changes it, because its factor is odd.
Two different elements in each other's place change it, too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

CHECKSUM_ACTION = "arpo-checksums:"
"""Prefix of the action with which SGLang's weight checker is asked for checksums; JSON follows."""
RECEIVED_ACTION = "arpo-received"
"""Action that asks each rank for figures of its last exchange."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = 2**64 - 1
_CHUNK = 2**20
"""Elements that are summed at a time; as int64 they take 8 MiB."""


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
    def of(cls, values: Tensor, view: Tensor) -> Self:
        """Return the piece `values`, whose place in the whole tensor is that of `view` (same shape)."""
        offset, strides = int(view.storage_offset()), view.stride()
        return cls(offset, tuple(view.shape), strides, _checksum(values, offset, strides))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the object whose `as_json` gave `data`."""
        return cls(data["offset"], tuple(data["sizes"]), tuple(data["strides"]), data["checksum"])

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON-safe values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of a tensor; elements of a tensor with one dimension."""

    sizes: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Name in torch, such as "bfloat16"."""
    first: int
    """Index of the first row."""
    last: int
    """One past the last row."""

    @classmethod
    def of(cls, tensor: Tensor, position: float, most_bytes: int) -> Self:
        """Return as many rows as fit into `most_bytes`, at least one, at the relative `position` from 0 to 1."""
        count = min(len(tensor), max(1, most_bytes * len(tensor) // tensor.nbytes))
        first = round(position * (len(tensor) - count))
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), first, first + count)

    def checksum(self, tensor: Tensor) -> int:
        """Return the checksum of these rows of the whole, contiguous tensor."""
        return _checksum(tensor[self.first : self.last], self.first * prod(self.sizes[1:]), tensor.stride())

    def piece_in(self, values: Tensor, view: Tensor) -> ChecksummedPart | None:
        """Return the part of these rows that `values` hold, whose place in the whole tensor is that of `view`.

        Returns:
            None if they hold no row.

        Raises:
            ValueError: the view is transposed, or the values have another number format.
        """
        width = prod(self.sizes[1:])
        if str(values.dtype) != f"torch.{self.dtype}" or (len(view) > 1 and view.stride(0) != width):
            raise ValueError(
                f"the engine holds {values.dtype} with a stride of {view.stride()}: bits cannot be compared"
            )
        offset = int(view.storage_offset()) // width
        start, stop = max(self.first - offset, 0), min(self.last - offset, len(values))
        return None if start >= stop else ChecksummedPart.of(values[start:stop], view[start:stop])

    def difference(self, pieces: Iterable[ChecksummedPart], expected: int) -> str | None:
        """Compare an engine's pieces of these rows with the `expected` checksum; return the difference, or None.

        Several ranks may hold the same piece (if there are fewer key/value heads than ranks), but it must be equal.
        """
        distinct: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
        for piece in pieces:
            if distinct.setdefault((piece.offset, piece.sizes, piece.strides), piece.checksum) != piece.checksum:
                return "two of its ranks hold different copies of one piece"
        held, wanted = sum(prod(size) for _, size, _ in distinct), (self.last - self.first) * prod(self.sizes[1:])
        if held != wanted:
            return f"it holds {held} of {wanted} elements"
        total = sum(distinct.values()) & _MASK
        return None if total == expected else f"checksum {total:016x} instead of {expected:016x}"


def _checksum(tensor: Tensor, offset: int, strides: Sequence[int]) -> int:
    """Sum bits * (2 * index + 1), from sums along each dimension: the index in the whole tensor is linear in them."""
    bits = tensor.detach().view(_INTEGERS[tensor.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)  # int64 is arithmetic modulo 2^64
    rows = max(1, _CHUNK // max(1, prod(bits.shape[1:])))
    for first in range(0, len(bits), rows):
        chunk = bits[first : first + rows].to(torch.int64)
        total += (2 * (offset + first * strides[0]) + 1) * chunk.sum()
        for dim, stride in enumerate(strides):
            others = [other for other in range(chunk.dim()) if other != dim]
            sums = chunk.sum(others) if others else chunk
            total += 2 * stride * (sums * torch.arange(len(sums), device=sums.device)).sum()
    return int(total) & _MASK
