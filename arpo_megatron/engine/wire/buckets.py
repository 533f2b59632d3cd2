"""What a push sends at a time: whole tensors, or a block of rows of a tensor that is larger than a bucket."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

_FORMAT = "arpo-rows:"
"""Begins the `load_format` of SGLang's request for a broadcast that brings a block; first row and all rows follow."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of a tensor, a bucket of their own. A tensor's blocks follow each other, from its first row on.

    Attributes:
        name: Hugging Face name of the tensor.
        tensor: the rows; of torch's device `meta` where they are not there yet.
        first: number of the first of them.
        count: rows of the whole tensor.
    """

    name: str
    tensor: Tensor
    first: int
    count: int

    @classmethod
    def announced(cls, load_format: str | None, names: Sequence[str], shapes: Sequence[Tensor]) -> Self | None:
        """What `load_format` says of a request, on the engine's side; None: the tensors are whole."""
        if load_format is None or not load_format.startswith(_FORMAT):
            return None
        first, count = map(int, load_format.removeprefix(_FORMAT).split(":"))
        return cls(names[0], shapes[0], first, count)

    @property
    def load_format(self) -> str:
        """Of the request that announces a broadcast."""
        return f"{_FORMAT}{self.first}:{self.count}"

    @property
    def whole(self) -> Tensor:
        """Shape and type of the whole tensor, without memory."""
        return torch.empty(self.count, *self.tensor.shape[1:], dtype=self.tensor.dtype, device="meta")

    @property
    def rows(self) -> slice:
        """Where the rows are in the whole tensor."""
        return slice(self.first, self.first + len(self.tensor))

    @property
    def is_last(self) -> bool:
        """Whether the whole tensor is there with these rows."""
        return self.first + len(self.tensor) == self.count


Bucket = Sequence[tuple[str, Tensor]] | Block


def sent(bucket: Bucket) -> Sequence[tuple[str, Tensor]]:
    """Names and values, of a block those of its rows."""
    return [(bucket.name, bucket.tensor)] if isinstance(bucket, Block) else bucket
