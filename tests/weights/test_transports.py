"""Transports alone: the fields of their requests, what they free, and what ends communication that hangs."""

import json
import re
import socket
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import AuthenticationError
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from arpo_megatron.engine.admin import EngineAdmin, EngineEndpoint, WeightPushError
from arpo_megatron.engine.server import checksums
from arpo_megatron.engine.wire import boxes, connections, groups, sharing
from arpo_megatron.engine.wire.checksums import CHECKSUM_ACTION
from arpo_megatron.engine.wire.watchdog import ExchangeAbortedError, Watchdog
from arpo_megatron.utils.stores import listen
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.sync import probe_gap
from arpo_megatron.weights.transports import Disk, Exchange, announce
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


def test_stranger_does_not_get_a_connection() -> None:
    listener = connections.Listener("the key")
    with socket.create_connection(("127.0.0.1", listener.port)):  # and sends nothing
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            connections.connect(listener.port, "another key")
        mine = connections.connect(listener.port, "the key")
        listener.connection(TIMEOUT_S).send_bytes(b"hello")
        assert mine.recv_bytes() == b"hello"
        with pytest.raises(OSError, match=r"no connection for 0\.1 s"):
            listener.connection(0.1)
        listener.close()


def test_listener_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HANDSHAKE_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError):
        connections.connect(silent.getsockname()[1], "the key")


class BlockedGroup:
    """A process group whose work never ends, as NCCL's when a peer has gone, until it is aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def wait(self) -> None:
        assert self.aborted.wait(TIMEOUT_S)
        raise RuntimeError("the communicator was aborted")


def unreachable() -> str:
    raise ConnectionError("no store")


def silent() -> str:
    """The machine with the store has gone without a word."""
    threading.Event().wait(TIMEOUT_S)
    return ""


@pytest.mark.parametrize(
    ("deadline_s", "failed", "reason"),
    [
        (0.1, lambda: "", "no end after 0.1 s"),
        (1.0, silent, "no end after 1 s"),
        (TIMEOUT_S, lambda: "rank 3 is gone", "rank 3 is gone"),
        (TIMEOUT_S, unreachable, "the group has ended: no store"),
    ],
    ids=["deadline", "silence", "elsewhere", "store"],
)
def test_watchdog_aborts_a_group_that_blocks(deadline_s: float, failed: Any, reason: str) -> None:
    group, started = BlockedGroup(), time.monotonic()
    with pytest.raises(ExchangeAbortedError, match=reason), Watchdog(group.aborted.set, deadline_s, failed):
        group.wait()
    assert time.monotonic() - started < TIMEOUT_S / 4


def test_pending_work_is_aborted_before_a_group_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for it in the destruction, and never returns if a peer has gone."""
    done: list[str] = []
    group = SimpleNamespace(abort=lambda: done.append("aborted"))
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda _: done.append("destroyed"))
    groups.PushGroup.leave(SimpleNamespace(group=group))  # type: ignore[arg-type]
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


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("no JSON", "weights_checker: Expecting value"),
        ('{"ranks": [{"checksums": {"error": "ValueError: no"}}]}', "rank 0 refuses the push: ValueError: no"),
        ("{}", "KeyError: 'ranks'"),
    ],
)
def test_failure_of_rank_zero_is_an_error_of_the_push(answer: str, message: str) -> None:
    """Then every rank of the trainer raises it, and the push is repeated."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.handle_request).start()
        requests = EngineAdmin([f"http://127.0.0.1:{server.server_port}"], TIMEOUT_S)
        with pytest.raises(WeightPushError, match=message):
            Control(None).on_rank_zero(lambda: requests.engine_shards({}, []))
        requests.close()


def test_engine_reports_its_reason_before_the_request_for_it_times_out() -> None:
    class WaitsInVain(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(json.loads(body["load_format"].removeprefix(boxes.EXCHANGE_FORMAT))["deadline_s"])
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"no buffer came")

    with HTTPServer(("127.0.0.1", 0), WaitsInVain) as server:
        threading.Thread(target=server.handle_request).start()
        url = f"http://127.0.0.1:{server.server_port}"
        requests = EngineAdmin([url], timeout_s=10.0)
        posts = announce.start(requests, Exchange("", (EngineEndpoint(url, 1, ""),), (), ()))
        with pytest.raises(WeightPushError, match="HTTP 400: no buffer came"):
            announce.run(posts, lambda: None)
        requests.close()


def test_rank_of_an_engine_that_raises_answers_with_its_error() -> None:
    """SGLang gathers the answers of all ranks: the others would wait for this one."""
    checker: Any = SimpleNamespace(
        _get_model=lambda: torch.nn.Linear(1, 1),
        _parallelism_info=lambda: SimpleNamespace(tp_rank=0, model_dump=dict),
    )
    for action, error in (
        (boxes.LAYOUT_ACTION + '{"types": {"w": [[1], "float32"]}, "together": []}', "AttributeError: .*load_weights"),
        (CHECKSUM_ACTION + "no JSON", "JSONDecodeError"),
        (boxes.PLAN_ACTION + "[]", "IndexError"),
    ):
        answer = checksums._handle(lambda *_: None, checker, action)
        assert re.match(error, answer["checksums"]["error"])
    assert checksums._handle(lambda *_: "SGLang's own", checker, "checksum") == "SGLang's own"
