"""The process group of a push, which trainer ranks and engine ranks form without being one job."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

FAILED_KEY = "failed"
"""Key in the group's store: a member writes why the push cannot succeed, and the others stop waiting."""


def join(store: Store, name: str, rank: int, members: int, backend: str, timeout: timedelta) -> Any:
    """Return the group, when all its members have joined. Raises RuntimeError at the timeout."""
    # torch has no public way to form a second group with processes outside the default group; SGLang, slime and verl
    # use this function.
    group, _ = _new_process_group_helper(
        members, rank, [], Backend(backend), PrefixStore(name, store), group_name=GroupName(name), timeout=timeout
    )
    _world.pg_group_ranks[group] = {member: member for member in range(members)}
    return group


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
