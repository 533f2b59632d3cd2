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


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of a tensor (elements of one with a single dimension).

    Attributes:
        sizes: shape of the whole tensor.
        dtype: as torch names it, "bfloat16".
        first: the first of the rows.
        last: one past the last.
    """

    sizes: tuple[int, ...]
    dtype: str
    first: int
    last: int

    @classmethod
    def of(cls, tensor: Tensor, position: float, most_bytes: int) -> Self:
        """As many rows as fit in that many bytes, at least one; `position` from 0 to 1 says where they are."""
        count = min(len(tensor), max(1, most_bytes * len(tensor) // tensor.nbytes))
        first = round(position * (len(tensor) - count))
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), first, first + count)

    def checksum(self, tensor: Tensor) -> int:
        """Of these rows of the whole tensor, which is contiguous."""
        return _checksum(tensor[self.first : self.last], self.first * prod(self.sizes[1:]), tensor.stride())

    def held(self, values: Tensor, place: Tensor) -> Piece | None:
        """What is in these rows of `values`, which lie in the whole tensor as the view `place` does; None: nothing.

        Raises:
            ValueError: the view is transposed, or the values are in another number format.
        """
        width = prod(self.sizes[1:])
        if str(values.dtype) != f"torch.{self.dtype}" or (len(place) > 1 and place.stride(0) != width):
            raise ValueError(
                f"the engine holds {values.dtype} with a stride of {place.stride()}: bits cannot be compared"
            )
        offset = int(place.storage_offset()) // width
        start, stop = max(self.first - offset, 0), min(self.last - offset, len(values))
        return None if start >= stop else Piece.of(values[start:stop], place[start:stop])

    def difference(self, pieces: Iterable[Piece], expected: int) -> str | None:
        """What is wrong with the pieces of these rows that an engine holds; None: nothing.

        Ranks may hold the same piece (key/value heads that are fewer than ranks); then all of them must agree.
        """
        found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
        for piece in pieces:
            if found.setdefault((piece.offset, piece.sizes, piece.strides), piece.checksum) != piece.checksum:
                return "two of its ranks hold different copies of one part"
        held, wanted = sum(prod(size) for _, size, _ in found), (self.last - self.first) * prod(self.sizes[1:])
        if held != wanted:
            return f"it holds {held} of {wanted} elements"
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
