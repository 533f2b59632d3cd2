"""Two buffers that take turns, for what cannot be sent from, or received into, its own place."""

import torch
from torch import Tensor


class Staging:
    """Memory of two rounds of a push: one is filled while the other one travels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.device = device
        self._buffers: list[Tensor | None] = [None, None]
        self._used = 0
        self.largest = 0
        """Bytes of the larger buffer so far."""

    def turn(self, size: int) -> None:
        """Switch to the other buffer, which must have room for `size` bytes; what it held is lost."""
        self._buffers.reverse()
        self._used = 0
        held = self._buffers[0]
        if held is None or len(held) < size:
            self._buffers[0] = None  # before the larger one is made
            self._buffers[0] = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.largest = max(self.largest, size)

    def take(self, size: int) -> Tensor:
        """Return the next uint8[size] of the buffer."""
        buffer = self._buffers[0]
        if buffer is None or self._used + size > len(buffer):
            raise AssertionError("a round needs more memory than it announced")
        self._used += size
        return buffer[self._used - size : self._used]

    def free(self) -> None:
        self._buffers = [None, None]


def as_bytes(values: Tensor) -> Tensor:
    """Return a contiguous tensor as uint8[n] without copying it."""
    return values.view(-1).view(torch.uint8)
