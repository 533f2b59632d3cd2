"""The process group of a push, which trainer ranks and engine ranks form without being one job."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

FAILED_KEY = "failed"
"""Key in the group's store: a member writes why the push cannot succeed, and the others stop waiting."""
_ARRIVED, _ALL_ARRIVED = "arrived", "all arrived"
_MEETING_POLL = timedelta(seconds=0.25)


def join(store: Store, name: str, rank: int, members: int, backend: str, timeout: timedelta) -> Any:
    """Return the group, when all its members have joined. Raises RuntimeError at the timeout."""
    # torch has no public way to form a second group with processes outside the default group; SGLang, slime and verl
    # use this function.
    group, _ = _new_process_group_helper(
        members, rank, [], Backend(backend), PrefixStore(name, store), group_name=GroupName(name), timeout=timeout
    )
    _world.pg_group_ranks[group] = {member: member for member in range(members)}
    return group


def meet(store: Store, members: int, deadline_s: float, failed: Callable[[], str]) -> None:
    """Return when all members are about to use the group for the first time.

    NCCL connects in the first operation, and if a member never comes to it, no abort ends that wait. So the members
    meet in the store before.

    Args:
        store: the group's.
        members: their number.
        deadline_s: seconds from now.
        failed: returns why a member will not come, or "".

    Raises:
        RuntimeError: the deadline has passed, a member has failed, or the store has gone.
    """
    deadline = time.monotonic() + deadline_s
    if store.add(_ARRIVED, 1) == members:
        store.set(_ALL_ARRIVED, "")
    while not store.check([_ALL_ARRIVED]):
        if reason := failed():
            raise RuntimeError(reason)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{members - store.add(_ARRIVED, 0)} of {members} members have not come to the exchange")
        with suppress(DistStoreError):  # the key was not set in that time
            store.wait([_ALL_ARRIVED], _MEETING_POLL)


def leave(group: Any) -> None:
    """End the group on this side. Destroying a group of NCCL would wait for what is pending, so that is aborted."""
    group.abort()
    dist.destroy_process_group(group)


def wait_for(works: Sequence[Any], device: torch.device) -> None:
    """Wait until the operations have ended. NCCL's only make the GPU wait, so the host waits for the GPU, too.

    Raises:
        RuntimeError: a peer has gone, or the group was aborted.
    """
    for work in works:
        work.wait()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
