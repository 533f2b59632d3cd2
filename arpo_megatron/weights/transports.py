"""Three ways to send a bucket of tensors to an engine. `sync.WeightSync` decides what is sent when.

| | a bucket travels through | for |
| --- | --- | --- |
| `Broadcast` | a separate process group: gloo, or NCCL on CUDA | engines that the trainer's network reaches |
| `SharedMemory` | CUDA IPC handles, or a shared memory file on a CPU | an engine on the trainer's GPU or machine |
| `Disk` | safetensors in a directory that both see | all other engines |
"""

import base64
import concurrent.futures
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world
from torch.multiprocessing import reductions

from arpo_megatron.engine.admin import (
    EngineAdmin,
    EngineEndpoint,
    WeightPushError,
    first_line,
    first_push_error,
    is_local,
    local_address,
)
from arpo_megatron.engine.wire.buckets import Block, Bucket, named_tensors
from arpo_megatron.errors import UserError
from arpo_megatron.models.safetensors import write_file, write_rows

_POLL_INTERVAL_S = 0.0005
_CLOSE_S = 5.0
"""Seconds to wait for engines to leave a group."""
_DEVICE_ARGUMENT = 6
"""Index of the device among the arguments of torch's `rebuild_cuda_tensor`."""


class Transport(Protocol):
    """A way to send buckets to engines."""

    buffers: int
    """Number of buffers for `export.hf_buckets`: 2, or 1 if `send` has copied the bucket when it returns."""

    def connect(self, engines: Sequence[EngineEndpoint]) -> None:
        """Prepare to send to these engines; called at the start of every push."""

    def send(self, bucket: Bucket) -> Callable[[], None]:
        """Start to send a non-empty bucket; the result waits until every engine has received it.

        The caller leaves the bucket's tensors unchanged until then. It may send one more bucket before waiting.
        """

    def finish(self) -> int:
        """Wait until every engine has loaded all buckets; return the number of requests since `connect`."""

    def close(self) -> None:
        """Release what `connect` made; engines that have ended are not an error."""


class Broadcast:
    """Broadcast each tensor in a process group of trainer rank 0 and all ranks of the engines.

    Args:
        requests: requests to the engines.
        backend: None selects nccl if torch sees a GPU, else gloo.
    """

    buffers = 2

    def __init__(self, requests: EngineAdmin, backend: Literal["gloo", "nccl"] | None = None) -> None:
        self._requests = requests
        self._backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self._engines: tuple[EngineEndpoint, ...] = ()
        self._name = ""
        self._group: Any = None
        self._posts: list[Future[Any]] = []
        """Announcements without an answer so far."""
        self._loads = 0
        self._acknowledged: list[Any] = []
        """Work that completes when every engine has received the last announcement."""

    def connect(self, engines: Sequence[EngineEndpoint]) -> None:
        """Form the group, unless it has the same engines as the last push and none has restarted."""
        self._loads = 0
        if self._group is not None and self._engines == tuple(engines):
            return
        self.close()
        self._engines = tuple(engines)
        self._join()

    def send(self, bucket: Bucket) -> Callable[[], None]:
        """Announce the tensors by HTTP and broadcast them after the bucket that is in flight."""
        works = self._announce(bucket)
        return lambda: self._wait(works)

    def finish(self) -> int:
        """Send an empty bucket and wait: an engine answers an announcement when it has loaded the bucket before it."""
        self._announce([])
        for post in self._posts:
            post.result()
        self._posts = []
        return self._loads

    def close(self) -> None:
        """Leave the group."""
        self._posts, self._acknowledged = [], []
        if self._group is None:
            return
        body = {"group_name": self._name}
        posts = self._requests.post_all(
            "destroy_weights_update_group", [(engine.url, body) for engine in self._engines]
        )
        dist.destroy_process_group(self._group)
        self._group = None
        concurrent.futures.wait(posts, _CLOSE_S)

    def _announce(self, bucket: Bucket) -> list[Any]:
        """Return the works of the process group that carry the tensors. The engines' half is
        `engine/server/receive.py`."""
        self._wait(self._acknowledged)  # otherwise this announcement could overtake the previous one
        tensors = [tensor.detach().contiguous() for _, tensor in named_tensors(bucket)]
        body: dict[str, Any] = {
            "names": [name for name, _ in named_tensors(bucket)],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": self._name,
            "load_format": bucket.load_format if isinstance(bucket, Block) else None,
            "flush_cache": False,
        }
        self._loads += 1
        self._posts += self._requests.post_all(
            "update_weights_from_distributed", [(engine.url, body) for engine in self._engines]
        )
        one = torch.zeros(1, device="cpu" if self._backend == "gloo" else "cuda")
        try:
            self._acknowledged = [dist.all_reduce(one, group=self._group, async_op=True)]
            return [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in tensors]
        except RuntimeError as error:
            raise self._failure(error) from error

    def _wait(self, works: Sequence[Any]) -> None:
        deadline = time.monotonic() + self._requests.timeout_s
        try:
            for work in works:
                while not work.is_completed():
                    for post in self._posts:
                        if post.done():
                            post.result()  # an engine that refused never joins the broadcast
                    if time.monotonic() > deadline:
                        raise first_push_error(self._posts, f"{self._where()}: no engine took the bucket in time")
                    time.sleep(_POLL_INTERVAL_S)
                work.wait()
        except RuntimeError as error:
            raise self._failure(error) from error
        self._posts = [post for post in self._posts if not post.done() or post.exception()]

    def _failure(self, error: RuntimeError) -> WeightPushError:
        return first_push_error(self._posts, f"{self._where()}: broadcasting a bucket: {first_line(error)}")

    def _join(self) -> None:
        world_size = 1 + sum(engine.ranks for engine in self._engines)
        address = local_address(self._engines[0].url)
        timeout = timedelta(seconds=self._requests.timeout_s)
        # Engines keep groups by name; a new name avoids the group that a crashed trainer left.
        self._name = f"arpo-weights-{time.time_ns()}"
        store = TCPStore(address, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        bodies, offset = [], 1
        for engine in self._engines:
            body = {
                "master_address": address,
                "master_port": store.port,
                "rank_offset": offset,
                "world_size": world_size,
                "group_name": self._name,
                "backend": self._backend,
            }
            bodies.append((engine.url, body))
            offset += engine.ranks
        posts = self._requests.post_all("init_weights_update_group", bodies)
        try:
            # torch has no public way to form a second group with processes outside the default group. SGLang, slime
            # and verl use this function; both ends must, because the keys in the store have to match.
            group, _ = _new_process_group_helper(
                world_size,
                0,
                [],
                Backend(self._backend),
                PrefixStore(self._name, store),
                group_name=GroupName(self._name),
                timeout=timeout,
            )
        except RuntimeError as error:
            raise first_push_error(posts, f"{self._where()}: joining the weight group: {first_line(error)}") from error
        for post in posts:
            post.result()
        _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        self._group = group

    def _where(self) -> str:
        return ", ".join(engine.url for engine in self._engines)


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
        """Free the buffer."""
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


class Disk:
    """Write each bucket, or all blocks of a tensor, to a safetensors file that the engines read; then delete it.

    Args:
        requests: requests to the engines.
        directory: path that trainer and engines share; it is created, and removed at the end.
    """

    buffers = 2

    def __init__(self, requests: EngineAdmin, directory: Path) -> None:
        self._requests = requests
        self._directory = directory
        self._engines: tuple[EngineEndpoint, ...] = ()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weight-writer")
        self._last: Future[None] | None = None
        self._loads = 0

    def connect(self, engines: Sequence[EngineEndpoint]) -> None:
        """Create the directory, without the leftovers of an interrupted push."""
        self._loads = 0
        self._engines = tuple(engines)
        shutil.rmtree(self._directory, ignore_errors=True)
        try:
            self._directory.mkdir(parents=True)
        except OSError as error:
            raise WeightPushError(f"sync.directory: {error}") from error

    def send(self, bucket: Bucket) -> Callable[[], None]:
        """Write the file and let the engines read it, in a thread."""
        self._last = self._writer.submit(self._write_and_load, bucket)  # one writer: buckets are written in order
        return self._last.result

    def finish(self) -> int:
        """Return the number of loads; all buckets have been waited for."""
        return self._loads

    def close(self) -> None:
        """Remove the directory; a bucket that waits in the queue is not sent any more."""
        if self._last is not None:
            self._last.cancel()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _write_and_load(self, bucket: Bucket) -> None:
        file = self._directory / "model.safetensors"
        try:
            if isinstance(bucket, Block):
                write_rows(file, bucket.name, tuple(bucket.whole.shape), bucket.tensor, bucket.first)
            else:
                write_file(file, bucket)
        except OSError as error:
            raise WeightPushError(f"{file}: {error.strerror}") from error
        if isinstance(bucket, Block) and not bucket.is_last:
            return
        body = {"model_path": str(self._directory), "load_format": "safetensors", "flush_cache": False}
        self._loads += 1
        posts = self._requests.post_all("update_weights_from_disk", [(engine.url, body) for engine in self._engines])
        for post in posts:
            post.result()
        file.unlink()
