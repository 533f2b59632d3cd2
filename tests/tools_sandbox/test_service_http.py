"""The service over HTTP: fair queueing, one execution per call, deadlines, draining, and its descriptions."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from tests.tools_sandbox.helpers.services import metric, running, running_calls, wait_until
from tools_sandbox.client import AsyncSandboxClient, SandboxClient, SandboxDenied, SandboxUnavailable
from tools_sandbox.config import Limits, ToolServiceConfig

StartService = Callable[..., Any]
UNIQUE = {"code": "import time, uuid; time.sleep(0.4); uuid.uuid4()"}


@pytest.fixture(scope="module")
def narrow() -> Iterator[Any]:
    """A service with one slot and room for three waiting calls."""
    with running({"max_concurrency": 1, "max_waiting": 3, "orphan_s": 0.5}) as service:
        post(service, arguments={"code": "0"})  # Retry-After is estimated from earlier calls
        yield service


def sleeping(seconds: float) -> dict[str, str]:
    return {"code": f"import time; time.sleep({seconds}); 'slept'"}


def waiting_calls(service: Any) -> int:
    return int(requests.get(f"{service.url}/health", timeout=5).json()["waiting"])


def executions(service: Any) -> float:
    return metric(service, "tools_sandbox_execution_seconds_count", tool="python")


def post(service: Any, **body: Any) -> requests.Response:
    return requests.post(f"{service.url}/call", json={"tool": "python", **body}, timeout=30)


def post_and_hang_up(service: Any, after_s: float, **body: Any) -> None:
    """Send a call and close the connection before the answer."""
    where = urlsplit(service.url)
    data = json.dumps({"tool": "python", **body}).encode()
    head = f"POST /call HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(head.encode() + data)
        time.sleep(after_s)


@contextmanager
def cutting_proxy(target: str, cuts: int) -> Iterator[str]:
    """Run a TCP relay that cuts its first `cuts` connections at the first byte of an answer."""
    where = urlsplit(target)
    left, lock = [cuts], threading.Lock()

    def relay(source: socket.socket, sink: socket.socket, *, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                with lock:
                    cut = answers and left[0] > 0
                    left[0] -= cut
                if cut:
                    break
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                ours, _ = listener.accept()
                theirs = socket.create_connection((where.hostname, where.port))
                for pair, answers in (((ours, theirs), False), ((theirs, ours), True)):
                    threading.Thread(target=relay, args=pair, kwargs={"answers": answers}, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_retry_after_broken_connection_executes_once(service: Any) -> None:
    for close_after_s in (0.1, 1.0):  # while the call runs, after it has ended
        before, request_id = executions(service), f"id {close_after_s}"
        post_and_hang_up(service, close_after_s, arguments=UNIQUE, request_id=request_id)
        answers = [post(service, arguments=UNIQUE, request_id=request_id).json()["text"] for _ in range(2)]
        assert len(set(answers)) == 1
        assert executions(service) - before == 1
    with cutting_proxy(service.url, cuts=2) as url, SandboxClient(url) as client:
        before = executions(service)
        assert client.call("python", UNIQUE).status == "ok"
        assert executions(service) - before == 1
    assert metric(service, "tools_sandbox_retries_answered") >= 4


def test_async_client_retries_with_same_id(service: Any) -> None:
    async def call(url: str) -> str:
        async with AsyncSandboxClient(url) as client:
            return (await client.call("python", UNIQUE)).status

    before = executions(service)
    with cutting_proxy(service.url, cuts=2) as url:
        assert asyncio.run(call(url)) == "ok"
    assert executions(service) - before == 1


def test_request_id_belongs_to_one_call(service: Any) -> None:
    assert post(service, arguments={"code": "1"}, request_id="same").json()["text"] == "1"
    assert post(service, arguments={"code": "2"}, request_id="same").status_code == 409


@pytest.mark.parametrize("request_id", ["", "known"])
def test_call_of_disconnected_caller_is_ended(narrow: Any, request_id: str) -> None:
    before = executions(narrow)
    post_and_hang_up(narrow, 0.3, arguments=sleeping(60), request_id=request_id)
    wait_until(lambda: running_calls(narrow) == 0)
    wait_until(lambda: len(narrow.at_work()) == 2)  # the service and the zygote
    assert executions(narrow) == before
    assert "Traceback" not in narrow.stderr()


def test_flood_of_one_trajectory_delays_no_other(narrow: Any) -> None:
    with ThreadPoolExecutor(14) as pool, SandboxClient(narrow.url) as client:
        first = pool.submit(post, narrow, arguments=sleeping(1.5), trajectory_id="hog")  # the others arrive meanwhile
        wait_until(lambda: running_calls(narrow) == 1)
        flood = [pool.submit(post, narrow, arguments=sleeping(0.3), trajectory_id="hog") for _ in range(6)]
        wait_until(lambda: any(each.done() for each in flood))  # one was refused
        assert client.call("python", {"code": "'quick'"}, trajectory_id="other").text == "quick"
        assert sum(not each.done() for each in flood) >= 1, "it had to wait for the flood"
        assert first.result().json()["text"] == "slept"
        replies = [each.result() for each in flood]
    refused = [reply for reply in replies if reply.status_code == 429]
    assert refused
    assert all(1 <= int(reply.headers["Retry-After"]) <= 30 for reply in refused)
    assert all(reply.json()["text"] == "slept" for reply in replies if reply not in refused)


def test_clients_wait_and_retry_when_service_is_full(narrow: Any) -> None:
    with ThreadPoolExecutor(7) as pool, SandboxClient(narrow.url, retries=0) as client:
        first = pool.submit(post, narrow, arguments=sleeping(1.0))  # the others arrive meanwhile
        wait_until(lambda: running_calls(narrow) == 1)
        before = metric(narrow, "tools_sandbox_refusals_total", reason="queue_full")
        calls = [pool.submit(client.call, "python", sleeping(0.05), trajectory_id=str(n)) for n in range(6)]
        assert [call.result().text for call in calls] == ["slept"] * 6
        assert first.result().json()["text"] == "slept"
    assert metric(narrow, "tools_sandbox_refusals_total", reason="queue_full") >= before + 2


def test_client_deadline_covers_all_attempts(narrow: Any) -> None:
    with ThreadPoolExecutor(8) as pool, SandboxClient(narrow.url) as client:
        blockers = [pool.submit(post, narrow, arguments=sleeping(0.6), trajectory_id=str(n)) for n in range(4)]
        wait_until(lambda: waiting_calls(narrow) == 3)
        with (
            SandboxClient(narrow.url, queue_wait_s=0.0) as impatient,
            pytest.raises(SandboxUnavailable) as caught,
        ):
            impatient.call("python", {"code": "1"}, timeout_s=0.5)
        assert caught.value.status == 429
        for trajectory_id in ("0", "fourth"):  # a trajectory with a call in the service, and a new one
            began = time.monotonic()
            with pytest.raises(SandboxUnavailable):
                client.call("python", {"code": "1"}, trajectory_id=trajectory_id, deadline_s=0.5)
            assert time.monotonic() - began < 1.5 or not all(blocker.done() for blocker in blockers)
        for blocker in blockers:
            blocker.result()
        with pytest.raises(ValueError, match="deadline_s"):
            client.call("python", {"code": "1"}, deadline_s=0.0)


def test_deadline_bounds_waiting_and_running(narrow: Any) -> None:
    began = time.monotonic()
    cut = post(narrow, arguments=sleeping(30), timeout_s=30, deadline_s=0.4)
    assert (cut.status_code, time.monotonic() - began < 15) == (504, True), "a timeout is a result that a model reads"
    late = post(narrow, arguments=sleeping(30), timeout_s=0.4, deadline_s=30)
    assert late.json()["status"] == "timeout"
    with ThreadPoolExecutor(1) as pool:
        blocker = pool.submit(post, narrow, arguments=sleeping(1))
        wait_until(lambda: running_calls(narrow) == 1)
        before = executions(narrow)
        assert post(narrow, arguments={"code": "1"}, deadline_s=0.2).status_code == 504
        assert blocker.result().json()["text"] == "slept"
    assert executions(narrow) - before == 1  # only the blocker was executed


def test_attempts_carry_remaining_deadline() -> None:
    deadlines = list[float]()

    class Full(BaseHTTPRequestHandler):  # a service that is always full
        def do_POST(self) -> None:
            deadlines.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["deadline_s"])
            self.send_response(429)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Full) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with SandboxClient(f"http://127.0.0.1:{server.server_port}") as client, pytest.raises(SandboxUnavailable):
            client.call("python", {"code": "1"}, deadline_s=1.0)
        server.shutdown()
    assert len(deadlines) > 2
    assert deadlines[0] <= 1.0
    assert all(before - after > 0.05 for before, after in itertools.pairwise(deadlines))


def test_sigterm_drains_calls_and_rejects_new_ones(start_service: StartService) -> None:
    service = start_service({"drain_s": 30})
    with requests.Session() as session, ThreadPoolExecutor(1) as pool:
        session.get(f"{service.url}/health")  # a connection from before the signal
        call = pool.submit(post, service, arguments=sleeping(1))
        wait_until(lambda: running_calls(service) == 1)
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: session.get(f"{service.url}/health").json()["status"] == "draining")
        refused = session.post(f"{service.url}/call", json={"tool": "python", "arguments": {"code": "1"}})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert call.result().json()["text"] == "slept"
    assert service.process.wait(60) == 0


def test_token_guards_everything_but_health_and_description(start_service: StartService) -> None:
    service = start_service(env={"TOOLS_SANDBOX_TOKEN": "open sesame"})
    with SandboxClient(service.url) as stranger, pytest.raises(SandboxDenied, match="401"):
        stranger.call("python", {"code": "1"})
    with SandboxClient(service.url, token="open sesame") as client:
        assert client.call("python", {"code": "1"}).text == "1"
        assert "sesame" not in client.call("python", {"code": "open('/proc/1/environ').read()"}).text
    for path, status in (("health", 200), ("tools", 401), ("metrics", 401), ("openapi.json", 200), ("docs", 200)):
        assert requests.get(f"{service.url}/{path}", timeout=5).status_code == status
    description = requests.get(f"{service.url}/openapi.json", timeout=5).json()
    assert set(description["paths"]) == {"/call", "/tools", "/health", "/metrics"}
    bearer = {"Authorization": "Bearer open sesame"}
    page = requests.get(f"{service.url}/metrics", headers=bearer, timeout=5).text
    assert 'tools_sandbox_answers_total{status="ok",tool="python"} 1.0' in page
    assert re.search(r"^tools_sandbox_process_resident_memory_bytes [1-9]", page, re.MULTILINE)


@pytest.mark.parametrize(
    "fields",
    [
        '"timeout_s": NaN',
        '"timeout_s": 1e999',
        '"deadline_s": Infinity',
        '"x": "\\ud800"',
        '"\\ud800": 1',
        '"request_id": 5',
        pytest.param(f'"trajectory_id": "{"t" * 1001}"', id="long trajectory"),
        pytest.param(f'"{"k" * 10_000}": 1', id="long key"),
        pytest.param(", ".join(f'"k{n}": 1' for n in range(1000)), id="many keys"),
        pytest.param(", ".join(f'"k{n}": 1' for n in range(100_000)), id="very many keys"),
    ],
)
def test_malformed_body_gets_short_reason(service: Any, fields: str) -> None:
    body = f'{{"tool": "python", "arguments": {{"code": "1"}}, {fields}}}'
    reply = requests.post(f"{service.url}/call", data=body, headers={"Content-Type": "application/json"}, timeout=10)
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["msg"]
    assert len(reply.content) < 1000
    assert "Traceback" not in service.stderr()


def test_very_many_arguments_get_short_answer(client: SandboxClient) -> None:
    answer = client.call("python", {f"k{number}": 1 for number in range(2000)})
    assert (answer.status, "more than 1000 arguments" in answer.text, len(answer.text) < 300) == ("error", True, True)


def test_too_large_body_is_rejected_unread(service: Any, client: SandboxClient) -> None:
    with pytest.raises(SandboxDenied, match="413"):
        client.call("python", {"code": "#" * 9_000_000})
    assert requests.post(f"{service.url}/call", data=iter([b"{}"]), timeout=5).status_code == 411


def test_log_is_json_lines_without_arguments(service: Any, client: SandboxClient) -> None:
    client.call("python", {"code": "'a secret word'"}, trajectory_id="logged")
    lines = [json.loads(line) for line in service.stderr().splitlines()]
    (call,) = [line for line in lines if line["event"] == "call" and line["trajectory"] == "logged"]
    assert (call["tool"], call["status"]) == ("python", "ok")
    assert {"time", "level", "event"} <= set(lines[0])
    assert "a secret word" not in service.stderr()


def test_python_calls_share_a_limit_of_memory() -> None:
    """Room for one call: the second waits until the first has ended."""
    limits = {"memory_mib": 512, "total_memory_mib": 1000}
    with running({"limits": limits, "max_concurrency": 8}) as service, ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(post, service, arguments=sleeping(seconds)) for seconds in (1.0, 1.1)]
        wait_until(lambda: waiting_calls(service) == 1)
        assert [call.result().json()["status"] for call in calls] == ["ok", "ok"]
    assert ToolServiceConfig(max_concurrency=8).slots("python") == 8
    config = ToolServiceConfig(limits=Limits(memory_mib=512, total_memory_mib=1000), max_concurrency=8)
    assert (config.slots("python"), config.slots("search")) == (1, 8)
