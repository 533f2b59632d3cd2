"""The unit of a push: whole tensors, or a block of rows of a tensor that is larger than a bucket."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

_FORMAT = "arpo-rows:"
"""Prefix of the `load_format` that announces a block; the first row and the number of all rows follow."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of a tensor, which form a bucket. The blocks of a tensor are sent in order, from its first row on."""

    name: str
    """Hugging Face name of the tensor."""
    tensor: Tensor
    """The rows; on torch's device `meta` before they have arrived."""
    first: int
    """Index of the first row in the whole tensor."""
    count: int
    """Number of rows of the whole tensor."""

    @classmethod
    def from_load_format(cls, load_format: str | None, names: Sequence[str], shapes: Sequence[Tensor]) -> Self | None:
        """Read a request on the engine's side; None if it announces whole tensors."""
        if load_format is None or not load_format.startswith(_FORMAT):
            return None
        first, count = map(int, load_format.removeprefix(_FORMAT).split(":"))
        return cls(names[0], shapes[0], first, count)

    @property
    def load_format(self) -> str:
        """`load_format` of the request that announces the block."""
        return f"{_FORMAT}{self.first}:{self.count}"

    @property
    def whole(self) -> Tensor:
        """A tensor with the shape and type of the whole tensor, without memory."""
        return torch.empty(self.count, *self.tensor.shape[1:], dtype=self.tensor.dtype, device="meta")

    @property
    def rows(self) -> slice:
        """Indices of the rows in the whole tensor."""
        return slice(self.first, self.first + len(self.tensor))

    @property
    def is_last(self) -> bool:
        """Whether the block ends with the tensor's last row."""
        return self.first + len(self.tensor) == self.count


Bucket = Sequence[tuple[str, Tensor]] | Block


def named_tensors(bucket: Bucket) -> Sequence[tuple[str, Tensor]]:
    """Return names and values; for a block, the values of its rows."""
    return [(bucket.name, bucket.tensor)] if isinstance(bucket, Block) else bucket
