"""The unit of a push by `disk`: whole tensors, or a block of rows of a tensor that is larger than a bucket."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows of a tensor, which form a bucket. Those of a tensor are sent in order, from its first row on."""

    name: str
    """Hugging Face name of the tensor."""
    tensor: Tensor
    """The rows."""
    first: int
    """Index of the first row in the whole tensor."""
    count: int
    """Number of rows of the whole tensor."""

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


Bucket = Sequence[tuple[str, Tensor]] | RowBlock
HfBuckets = Callable[[], Iterator[Bucket]]
