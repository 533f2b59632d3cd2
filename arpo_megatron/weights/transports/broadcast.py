"""Buckets through a process group of trainer rank 0 and the engines' ranks."""

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

from arpo_megatron.engine.admin import (
    EngineAdmin,
    EngineEndpoint,
    WeightPushError,
    first_line,
    first_push_error,
    local_address,
)
from arpo_megatron.engine.wire.buckets import Block, Bucket, named_tensors
from arpo_megatron.utils.stores import listen

_POLL_INTERVAL_S = 0.0005
_CLOSE_S = 5.0
"""Seconds to wait for engines to leave a group."""


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
        """Leave the process group shared with the engines; the engines leave it, too."""
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
        store = listen(address, 0, world_size, timeout)
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
