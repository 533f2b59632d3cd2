"""Memory that two processes of a machine map: CUDA IPC, and named shared memory on a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

_DEVICE_ARGUMENT = 6
"""Index of the device among the arguments of torch's `rebuild_cuda_tensor`."""


def shareable(size: int, device: torch.device) -> Tensor:
    """Return uint8[size] that another process can map."""
    if device.type != "cuda":
        with _shared_by_name():
            # `share_memory_` would fill the memory with a copy of what was allocated before.
            return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
    # A handle to memory in expandable segments cannot be opened without rights over this process. The allocator reads
    # the setting at every allocation.
    expandable = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if expandable:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    finally:
        if expandable:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def offer(connection: Connection, buffer: Tensor) -> None:
    """Send a handle of shareable memory."""
    with _shared_by_name():
        connection.send(reductions.reduce_tensor(buffer)[1] if buffer.is_cuda else buffer)


def accept(connection: Connection, device: torch.device) -> Tensor:
    """Receive a handle and map its memory, which is on `device` or in host memory.

    The device's number is this process's own: the sender may number the GPUs differently, and opening the memory by the
    sender's number would use another GPU.
    """
    got = connection.recv()
    if isinstance(got, Tensor):
        return got
    number = torch.cuda.current_device() if device.index is None else device.index
    arguments = [*got[:_DEVICE_ARGUMENT], number, *got[_DEVICE_ARGUMENT + 1 :]]
    mapped: Tensor = reductions.rebuild_cuda_tensor(*arguments)
    return mapped


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share CPU memory by file name: torch's default, a file descriptor, needs the receiver to be a child process."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
