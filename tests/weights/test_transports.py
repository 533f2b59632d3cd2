"""Transports alone: the fields of their requests, what they free, and what ends communication that hangs."""

import os
import threading
from datetime import timedelta
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from arpo_megatron.engine.admin import EngineAdmin, WeightPushError
from arpo_megatron.engine.wire import groups, sharing
from arpo_megatron.engine.wire.watchdog import ExchangeAbortedError, Watchdog
from arpo_megatron.utils.stores import listen
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.sync import probe_gap
from arpo_megatron.weights.transports import Disk, Exchange, ipc
from tests.faults import small_disk

TIMEOUT_S = 60.0


def test_handle_is_opened_on_the_receivers_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's GPU 0 may be the receiver's GPU 3; opening it as GPU 0 would use a GPU of another rank."""
    ours, theirs = Pipe()
    arguments = [torch.Tensor, (4,), (1,), 0, torch.UntypedStorage, torch.uint8, 0, b"handle", 4, 0, b"", 0, b"", False]
    opened: list[Any] = []
    monkeypatch.setattr(sharing.reductions, "rebuild_cuda_tensor", lambda *got: opened.extend(got))
    ours.send(arguments)
    sharing.accept(theirs, torch.device("cuda", 3))
    assert opened[sharing._DEVICE_ARGUMENT] == 3
    assert opened[:6] + opened[7:] == arguments[:6] + arguments[7:]


def test_two_shared_buffers_take_turns_and_are_free_between_pushes() -> None:
    """The engine's half reads each buffer when it is handed over, and none is filled before it has been read."""

    def mapped() -> bool:
        return f"/torch_{os.getpid()}_" in Path("/proc/self/maps").read_text()

    ours, theirs = Pipe()
    peer = ipc._Peer(ours, torch.device("cpu"), TIMEOUT_S)
    read: list[int] = []

    def engine() -> None:
        for _ in range(2):
            buffers = [sharing.accept(theirs, torch.device("cpu")) for _ in range(2)]
            for _ in range(5):
                buffers.reverse()
                theirs.recv_bytes()
                read.append(int(buffers[0][0]))
                assert buffers[0].eq(read[-1]).all()
                theirs.send_bytes(b"read")

    reader = threading.Thread(target=engine)
    reader.start()
    for push in range(2):
        peer.offer(1000)
        assert mapped()
        for turn in range(5):
            peer.turn()
            peer.take(400).fill_(10 * push + turn)
            peer.take(600).fill_(10 * push + turn)
            peer.hand_over()
        peer.wait_until_read()
        peer.free()
    reader.join()
    assert not peer.failure
    assert read == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert not mapped()


def test_stranger_does_not_get_a_connection() -> None:
    entrance = ipc._Entrance("the key")
    from multiprocessing import AuthenticationError
    from multiprocessing.connection import Client

    with pytest.raises((AuthenticationError, EOFError, OSError)):
        Client(("127.0.0.1", entrance.port), authkey=b"another key")
    mine = Client(("127.0.0.1", entrance.port), authkey=b"the key")
    entrance.connection().send_bytes(b"hello")
    assert mine.recv_bytes() == b"hello"
    entrance.close()
    alone = ipc._Entrance("the key")
    alone.close()  # although no engine has come


class BlockedGroup:
    """A process group whose work never ends, as NCCL's when a peer has gone, until it is aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def wait(self) -> None:
        assert self.aborted.wait(TIMEOUT_S)
        raise RuntimeError("the communicator was aborted")


def unreachable() -> str:
    raise ConnectionError("no store")


@pytest.mark.parametrize(
    ("deadline_s", "failed", "reason"),
    [
        (0.1, lambda: "", "no end after 0.1 s"),
        (TIMEOUT_S, lambda: "rank 3 is gone", "rank 3 is gone"),
        (TIMEOUT_S, unreachable, "the group has ended: no store"),
    ],
    ids=["deadline", "elsewhere", "store"],
)
def test_watchdog_aborts_a_group_that_blocks(deadline_s: float, failed: Any, reason: str) -> None:
    group = BlockedGroup()
    with pytest.raises(ExchangeAbortedError, match=reason), Watchdog(group.aborted.set, deadline_s, failed):
        group.wait()


def test_pending_work_is_aborted_before_a_group_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for it in the destruction, and never returns if a peer has gone."""
    done: list[str] = []
    group = SimpleNamespace(abort=lambda: done.append("aborted"))
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda _: done.append("destroyed"))
    groups.leave(group)
    assert done == ["aborted", "destroyed"]


def test_watchdog_leaves_a_group_alone_that_ends() -> None:
    group = BlockedGroup()
    with Watchdog(group.aborted.set, TIMEOUT_S, lambda: ""):
        pass
    with pytest.raises(ValueError, match="its own error"), Watchdog(group.aborted.set, TIMEOUT_S, lambda: ""):
        raise ValueError("its own error")
    assert not group.aborted.is_set()


def test_full_disk_is_reported_and_freed(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    requests = EngineAdmin(["http://127.0.0.1:9"], TIMEOUT_S)
    gathered: list[int] = []

    def buckets() -> Any:
        for number in range(3):
            gathered.append(number)
            yield [("weight", torch.ones(5000))]

    transport = Disk(Control(None), requests, buckets, disk / "sync")
    with small_disk(disk, 2**14) as full:
        transport.connect(Exchange("", (), (), ()))
        with pytest.raises(WeightPushError, match=rf"sync/model\.safetensors: {full}"):
            transport.send()
        transport.close()
        assert list(disk.iterdir()) == [], "the disk is freed until the next attempt"
    assert gathered == [0, 1, 2], "every rank takes part in gathering all"
    requests.close()


def test_probe_gap_is_the_largest_difference_and_infinite_for_nan() -> None:
    assert probe_gap([-1.0, -2.0], np.float32([-1.0, -2.5])) == 0.5
    assert probe_gap([-1.0], [np.nan]) == float("inf")
    assert probe_gap([-np.inf], [-np.inf]) == float("inf")
    with pytest.raises(ValueError, match="cannot be compared"):
        probe_gap([-1.0], [-1.0, -2.0])
    assert probe_gap([], []) == 0.0


def members(count: int) -> list[TCPStore]:
    first = listen("127.0.0.1", 0, count, timedelta(seconds=TIMEOUT_S))
    others = [TCPStore("127.0.0.1", first.port, count, is_master=False) for _ in range(count - 1)]
    return [first, *others]


def test_members_meet_before_the_first_operation() -> None:
    """NCCL connects in it, and that wait cannot be aborted."""
    stores, came = members(3), list[int]()

    def come(rank: int) -> None:
        groups.meet(stores[rank], 3, TIMEOUT_S, lambda: "")
        came.append(rank)

    waiting = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in waiting:
        thread.start()
    waiting[0].join(0.5)
    assert not came
    come(2)
    for thread in waiting:
        thread.join(TIMEOUT_S)
    assert sorted(came) == [0, 1, 2]


@pytest.mark.parametrize(
    ("deadline_s", "failed", "reason"),
    [
        (0.1, lambda: "", "1 of 2 members have not come to the exchange"),
        (TIMEOUT_S, lambda: "an engine refuses the plan", "an engine refuses the plan"),
    ],
    ids=["deadline", "elsewhere"],
)
def test_member_that_never_comes_ends_the_meeting(deadline_s: float, failed: Any, reason: str) -> None:
    stores = members(2)
    with pytest.raises(RuntimeError, match=reason):
        groups.meet(stores[0], 2, deadline_s, failed)
