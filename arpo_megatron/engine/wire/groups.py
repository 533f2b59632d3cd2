"""The process group of pushes: of trainer ranks, or of trainer ranks and engine ranks, which are not one job."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

from arpo_megatron.engine.wire.watchdog import ExchangeAbortedError, Watchdog

_FAILED = "failed"
"""Key in the group's store: a member writes why the push cannot succeed, and the others stop waiting."""
_ARRIVED, _ALL_ARRIVED = "arrived", "all arrived"
_MEETING_POLL_S = 0.02


class PushGroup:
    """The process group for the rounds of pushes. A member that fails ends a push on all members.

    Args:
        store: a store that only this group uses.
        name: unique among the groups of this process.
        rank: index of this member.
        members: number of members.
        backend: "nccl" or "gloo".
        timeout_s: deadline of forming the group, and of each push.

    Raises:
        RuntimeError: not all members have joined.
    """

    def __init__(self, store: Store, name: str, rank: int, members: int, backend: str, timeout_s: float) -> None:
        self._store = store
        self._members = members
        self._backend = backend
        self._wake = threading.Event()
        """Ends the present `wait`."""
        self._aborted = False
        self._met = False
        """Whether all members have used the group."""
        self.group: Any = None
        """For torch's operations; None after leaving."""
        # An operation that reaches NCCL's own timeout ends the process, so `opened` must abort it before.
        timeout = timedelta(seconds=2 * timeout_s if backend == "nccl" else timeout_s)
        # torch has no public way to form a second group with processes outside the default group; SGLang, slime and
        # verl use this function.
        self.group, _ = _new_process_group_helper(
            members,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=GroupName(name),
            timeout=timeout,
        )
        _world.pg_group_ranks[self.group] = {member: member for member in range(members)}

    @contextmanager
    def opened(
        self, who: str, device: torch.device, deadline_s: float, failed_elsewhere: Callable[[], str] = lambda: ""
    ) -> Iterator[list[Any]]:
        """Exchange the rounds of one push. Yields the first operation, in which NCCL connects.

        A member that fails writes its reason to the store, and leaves. The other members' watchdogs end their waits.

        Args:
            who: this member's name in a message.
            device: where the group's operations take place.
            deadline_s: seconds until a watchdog aborts the group.
            failed_elsewhere: returns why the push cannot succeed, or ""; asked regularly.

        Raises:
            RuntimeError: a member has failed; the first one's reason.
        """
        store = self._store

        def failed() -> str:
            if reason := failed_elsewhere():
                return store.compare_set(_FAILED, "", reason).decode()
            return store.get(_FAILED).decode() if store.check([_FAILED]) else ""

        try:
            if not self._met:
                meet(store, self._members, deadline_s, failed)
                self._met = True
            with Watchdog(partial(self._abort, self.group), deadline_s, failed):
                yield [dist.all_reduce(torch.zeros(1, device=device), group=self.group, async_op=True)]
        except ExchangeAbortedError:  # the others know why, reach their own deadlines, or cannot ask the store either
            self.leave()
            raise
        except Exception as error:
            reason = f"{who}: {str(error) or type(error).__name__}"
            with suppress(RuntimeError):  # the store has gone with the process that kept it
                reason = store.compare_set(_FAILED, "", reason).decode()
            self.leave()
            raise RuntimeError(reason) from error

    def wait(self, works: Sequence[Any], device: torch.device) -> None:
        """Wait until operations of this group have ended. Raises RuntimeError: a peer has gone, or a watchdog ended it.

        Gloo has no abort. So a thread waits for its operations, and is left behind until their timeout.
        """
        if self._backend != "gloo":
            wait_for(works, device)
            return
        ended, failures = threading.Event(), list[RuntimeError]()

        def wait() -> None:
            try:
                wait_for(works, device)
            except RuntimeError as error:
                failures.append(error)
            ended.set()

        self._wake = ended
        if not self._aborted:
            waiting = threading.Thread(target=wait, name="weight-wait", daemon=True)
            waiting.start()
            ended.wait()
            if not self._aborted:
                waiting.join()  # it ends now; until then it keeps the operations, and so their buffers
        if failures:
            raise failures[0]
        if self._aborted:
            raise RuntimeError("the group was aborted")

    def _abort(self, group: Any) -> None:
        self._aborted = True
        self._wake.set()
        group.abort()

    def leave(self) -> None:
        """End the group on this side, once. Destroying a group of NCCL would wait for what is pending: abort that."""
        if self.group is not None:
            self.group.abort()
            dist.destroy_process_group(self.group)
        self.group = None


def meet(store: Store, members: int, deadline_s: float, failed: Callable[[], str]) -> None:
    """Return when all members are about to use the group for the first time.

    NCCL connects in the first operation, and if a member never comes to it, no abort ends that wait. So the members
    meet in the store before.

    Args:
        store: store of the group.
        members: number of members of the group.
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
        time.sleep(_MEETING_POLL_S)


def wait_for(works: Sequence[Any], device: torch.device) -> None:
    """Wait until the operations have ended. NCCL's only make the GPU wait, so the host waits for the GPU, too.

    Raises:
        RuntimeError: a peer has gone, or the group was aborted.
    """
    for work in works:
        work.wait()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
