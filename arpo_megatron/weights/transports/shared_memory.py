"""Buckets through memory that the trainer shares with engines on its machine."""

import base64
import concurrent.futures
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from arpo_megatron.engine.admin import EngineAdmin, EngineEndpoint, is_local
from arpo_megatron.engine.wire.buckets import Block, Bucket, named_tensors
from arpo_megatron.errors import UserError

_DEVICE_ARGUMENT = 6
"""Index of the device among the arguments of torch's `rebuild_cuda_tensor`."""


class SharedMemory:
    """Copy each bucket into one buffer that the engine's processes map: CUDA IPC, or shared memory on a CPU.

    Args:
        requests: requests to the engines, all on this machine.

    Raises:
        UserError: an engine is on another machine.
    """

    buffers = 1

    def __init__(self, requests: EngineAdmin) -> None:
        for url in requests.urls:
            if not is_local(url):
                raise UserError(f"sync.transport=ipc: the engine at {url} is not on the trainer's machine")
        self._requests = requests
        self._engines: tuple[EngineEndpoint, ...] = ()
        self._buffer: Tensor | None = None
        self._reading: list[Future[Any]] = []
        """Requests of the bucket that is in the buffer."""
        self._loads = 0

    def connect(self, engines: Sequence[EngineEndpoint]) -> None:
        """Remember the engines; there is nothing to join."""
        self._loads = 0
        self._engines = tuple(engines)

    def send(self, bucket: Bucket) -> Callable[[], None]:
        """Copy the tensors into the buffer when it is free, and send its handle to every rank of every engine."""
        concurrent.futures.wait(self._reading)
        block, values = bucket if isinstance(bucket, Block) else None, named_tensors(bucket)
        wholes = [tensor for _, tensor in values] if block is None else [block.whole]
        flat = self._room(sum(whole.nbytes for whole in wholes), values[0][1].device)
        metadata, end = [], 0
        rows = ... if block is None else block.rows
        for (name, tensor), whole in zip(values, wholes, strict=True):
            start, end = end, end + whole.nbytes
            flat[start:end].view(whole.dtype).view(whole.shape)[rows].copy_(tensor.detach())
            bounds = {"start_idx": start, "end_idx": end, "numel": whole.nbytes}
            # SGLang's FlattenedTensorMetadata in all but name; it reads the attributes and unpickles few classes.
            metadata.append(SimpleNamespace(name=name, shape=whole.shape, dtype=whole.dtype, **bounds))
        if block is not None and not block.is_last:  # SGLang reads whole tensors: blocks are assembled in the buffer
            return lambda: None
        if flat.is_cuda:
            torch.cuda.synchronize()  # another process reads it, on another stream
        bodies = []
        for engine in self._engines:
            # A handle for each rank: torch counts who has opened one.
            payload = [_pickled(flat, metadata) for _ in range(engine.ranks)]
            body = {"serialized_named_tensors": payload, "load_format": "flattened_bucket", "flush_cache": False}
            bodies.append((engine.url, body))
        self._loads += 1
        posts = self._reading = self._requests.post_all("update_weights_from_tensor", bodies)

        def wait() -> None:
            for post in posts:
                post.result()

        return wait

    def finish(self) -> int:
        """Free the buffer for training; all buckets have been waited for."""
        self.close()
        return self._loads

    def close(self) -> None:
        """Free the buffer; a later push would allocate another one."""
        self._buffer, self._reading = None, []

    def _room(self, size: int, device: torch.device) -> Tensor:
        """Return the first `size` bytes of the buffer, uint8[size]."""
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = None  # before the larger one is made
            self._buffer = _shareable(size, device)
        return self._buffer[:size]


class _CudaHandle:
    """Pickles a CUDA tensor as SGLang's processes expect it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        function, arguments = reductions.reduce_tensor(self._tensor)[:2]
        # The engine may number the GPUs differently; it accepts a GPU's UUID instead of its number.
        device = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
        return function, (*arguments[:_DEVICE_ARGUMENT], device, *arguments[_DEVICE_ARGUMENT + 1 :])


def _shareable(size: int, device: torch.device) -> Tensor:
    """Return uint8[size] that another process can map."""
    if device.type != "cuda":
        with _shared_by_name():
            buffer = torch.empty(size, dtype=torch.uint8)
            buffer.share_memory_()
            return buffer
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


def _pickled(flat: Tensor, metadata: Sequence[SimpleNamespace]) -> str:
    """Serialize a flattened bucket for one rank as SGLang's `MultiprocessingSerializer` does."""
    stream = BytesIO()
    with _shared_by_name():
        handle = _CudaHandle(flat) if flat.is_cuda else flat
        ForkingPickler(stream).dump({"flattened_tensor": handle, "metadata": metadata})
    return base64.b64encode(stream.getvalue()).decode()


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share CPU memory by file name: torch's default, a file descriptor, needs the receiver to be a child process."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
