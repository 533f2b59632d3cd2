"""The reference policy of a KL penalty: the first weights, kept in host memory and swapped in for a log-prob pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ReferencePolicy:
    """A copy of this rank's parameters in host memory (pinned with CUDA).

    Args:
        chunks: this rank's part of the model; their current weights become the reference.
    """

    @torch.no_grad()
    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._weights = [_on_host(parameter) for parameter in self._parameters]

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Let the model compute with the reference weights inside the context; restore its own bit for bit."""
        own = [_on_host(parameter) for parameter in self._parameters]
        try:
            self._fill(self._weights)
            yield
        finally:
            self._fill(own)

    @torch.no_grad()
    def _fill(self, weights: Sequence[Tensor]) -> None:
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.copy_(weight)


def _on_host(parameter: Tensor) -> Tensor:
    copied = torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=parameter.is_cuda)
    return copied.copy_(parameter.detach())
