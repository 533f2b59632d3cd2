"""Two buffers that take turns, for what cannot be sent from, or received into, its own place."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Staging:
    """Memory of two rounds of a push: one is filled while the other one travels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.current = 0
        """Index of the buffer that is filled: 0 or 1."""
        self._buffers: list[Tensor | None] = [None, None]
        self.used = 0
        """Bytes of that buffer that have been taken."""
        self.largest = 0
        """Bytes of the larger buffer so far."""

    def use(self, buffers: Sequence[Tensor]) -> None:
        """Use these two buffers, uint8[n] each, until they are freed."""
        self._buffers = list(buffers)
        self.largest = max(self.largest, *map(len, buffers))

    def switch(self, size: int) -> None:
        """Switch to the other buffer, which must have room for `size` bytes; what it held is lost."""
        self.current = 1 - self.current
        self.used = 0
        held = self._buffers[self.current]
        if held is None or len(held) < size:
            self._buffers[self.current] = None  # before the larger one is made
            self._buffers[self.current] = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.largest = max(self.largest, size)

    def take(self, size: int) -> Tensor:
        """Return the next uint8[size] of the buffer."""
        buffer = self._buffers[self.current]
        start, self.used = self.used, self.used + size
        assert buffer is not None and self.used <= len(buffer), "a round needs more memory than it announced"
        return buffer[start : self.used]

    def free(self) -> None:
        """Free both buffers."""
        self._buffers = [None, None]


def as_bytes(values: Tensor) -> Tensor:
    """Return a contiguous tensor as uint8[n] without copying it."""
    return values.view(-1).view(torch.uint8)
