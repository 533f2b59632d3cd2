"""What the service promises its callers: fair turns, one execution a call, deadlines, an orderly end."""

from __future__ import annotations

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
from prometheus_client.parser import text_string_to_metric_families

from tests.tools_sandbox.test_service_process import running_calls, wait_until
from tools_sandbox.client import AsyncSandboxClient, SandboxClient, SandboxDenied, SandboxUnavailable

StartService = Callable[..., Any]
UNIQUE = {"code": "import time, uuid; time.sleep(0.4); uuid.uuid4()"}


def sleeping(seconds: float) -> dict[str, str]:
    return {"code": f"import time; time.sleep({seconds}); 'slept'"}


def metric(service: Any, name: str, **labels: str) -> float:
    page = requests.get(f"{service.url}/metrics", timeout=5).text
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def executions(service: Any) -> float:
    return metric(service, "tools_sandbox_execution_seconds_count", tool="python")


def post(service: Any, **body: Any) -> requests.Response:
    return requests.post(f"{service.url}/call", json={"tool": "python", **body}, timeout=30)


def post_and_hang_up(service: Any, after_s: float, **body: Any) -> None:
    """Send a call and break the connection before its answer."""
    where = urlsplit(service.url)
    data = json.dumps({"tool": "python", **body}).encode()
    head = f"POST /call HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(head.encode() + data)
        time.sleep(after_s)


@contextmanager
def cutting_proxy(target: str, cuts: int) -> Iterator[str]:
    """A TCP relay that breaks its first `cuts` connections at the first byte of an answer."""
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


def test_a_retry_after_a_broken_socket_executes_nothing_twice(start_service: StartService) -> None:
    service = start_service()
    for breaks in (0.1, 1.0):  # while it runs, after it has ended
        before = executions(service)
        post_and_hang_up(service, breaks, arguments=UNIQUE, request_id=f"id {breaks}")
        answers = [post(service, arguments=UNIQUE, request_id=f"id {breaks}").json()["text"] for _ in range(2)]
        assert len(set(answers)) == 1
        assert executions(service) - before == 1
    with cutting_proxy(service.url, cuts=2) as url, SandboxClient(url) as client:
        before = executions(service)
        assert client.call("python", UNIQUE).status == "ok"
        assert executions(service) - before == 1
    assert metric(service, "tools_sandbox_replayed") >= 4


def test_the_async_client_too_asks_again_under_the_same_id(start_service: StartService) -> None:
    import asyncio

    service = start_service()

    async def call(url: str) -> str:
        async with AsyncSandboxClient(url) as client:
            return (await client.call("python", UNIQUE)).status

    with cutting_proxy(service.url, cuts=2) as url:
        assert asyncio.run(call(url)) == "ok"
    assert executions(service) == 1


def test_a_request_id_belongs_to_one_question(start_service: StartService) -> None:
    service = start_service()
    assert post(service, arguments={"code": "1"}, request_id="same").json()["text"] == "1"
    assert post(service, arguments={"code": "2"}, request_id="same").status_code == 409


@pytest.mark.parametrize("request_id", ["", "known"])
def test_a_call_whose_caller_goes_away_is_ended(start_service: StartService, request_id: str) -> None:
    service = start_service({"orphan_s": 0.5})
    post_and_hang_up(service, 0.3, arguments=sleeping(60), request_id=request_id)
    wait_until(lambda: running_calls(service) == 0)
    wait_until(lambda: len(service.at_work()) == 2)  # the service and the process that calls are forked from
    assert executions(service) == 0
    assert "Traceback" not in service.stderr()


def test_a_flood_of_one_trajectory_holds_up_no_other(start_service: StartService) -> None:
    service = start_service({"max_concurrency": 1, "max_waiting": 10})
    with ThreadPoolExecutor(14) as pool, SandboxClient(service.url) as client:
        first = pool.submit(post, service, arguments=sleeping(2), trajectory_id="hog")  # while it runs the others come
        wait_until(lambda: running_calls(service) == 1)
        flood = [pool.submit(post, service, arguments=sleeping(0.2), trajectory_id="hog") for _ in range(12)]
        wait_until(lambda: any(each.done() for each in flood))  # one that was refused
        assert client.call("python", {"code": "'quick'"}, trajectory_id="other").text == "quick"
        assert sum(not each.done() for each in flood) >= 3, "it had to wait for the flood"
        assert first.result().json()["text"] == "slept"
        replies = [each.result() for each in flood]
    refused = [reply for reply in replies if reply.status_code == 429]
    assert refused
    assert all(1 <= int(reply.headers["Retry-After"]) <= 30 for reply in refused)
    assert all(reply.json()["text"] == "slept" for reply in replies if reply not in refused)


def test_clients_come_back_when_a_full_service_told_them_to(start_service: StartService) -> None:
    service = start_service({"max_concurrency": 1, "max_waiting": 1})
    with ThreadPoolExecutor(7) as pool, SandboxClient(service.url, retries=0) as client:
        first = pool.submit(post, service, arguments=sleeping(1.5))  # while it runs the others come
        wait_until(lambda: running_calls(service) == 1)
        calls = [pool.submit(client.call, "python", sleeping(0.2), trajectory_id=str(n)) for n in range(6)]
        assert [call.result().text for call in calls] == ["slept"] * 6
        assert first.result().json()["text"] == "slept"
    assert metric(service, "tools_sandbox_refusals_total", reason="queue_full") >= 2
    impatient = SandboxClient(service.url, queue_wait_s=0.0)
    with ThreadPoolExecutor(8) as pool:
        blockers = [pool.submit(post, service, arguments=sleeping(1.5), trajectory_id=str(n)) for n in range(2)]
        wait_until(lambda: requests.get(f"{service.url}/health", timeout=5).json()["waiting"] == 1)
        with pytest.raises(SandboxUnavailable) as caught:
            impatient.call("python", {"code": "1"}, timeout_s=0.5)
        assert caught.value.status == 429
        for blocker in blockers:
            blocker.result()


def test_a_deadline_bounds_waiting_and_running(start_service: StartService) -> None:
    service = start_service({"max_concurrency": 1})
    began = time.monotonic()
    cut = post(service, arguments=sleeping(30), timeout_s=30, deadline_s=0.4).json()
    assert (cut["status"], time.monotonic() - began < 15) == ("timeout", True)  # half of what it would take
    with ThreadPoolExecutor(1) as pool:
        blocker = pool.submit(post, service, arguments=sleeping(1))
        wait_until(lambda: running_calls(service) == 1)
        before = executions(service)
        assert post(service, arguments={"code": "1"}, deadline_s=0.2).status_code == 504
        assert blocker.result().json()["text"] == "slept"
    assert executions(service) - before == 1  # the blocker's; nobody waited for the other


def test_a_client_waits_no_longer_than_its_deadline_all_attempts_together(start_service: StartService) -> None:
    service = start_service({"max_concurrency": 1, "max_waiting": 1})
    with ThreadPoolExecutor(8) as pool, SandboxClient(service.url) as client:
        blockers = [pool.submit(post, service, arguments=sleeping(2), trajectory_id=str(n)) for n in range(2)]
        wait_until(lambda: requests.get(f"{service.url}/health", timeout=5).json()["waiting"] == 1)
        for trajectory_id in ("0", "third"):  # one may wait, the other is told 429
            began = time.monotonic()
            with pytest.raises(SandboxUnavailable):
                client.call("python", {"code": "1"}, trajectory_id=trajectory_id, deadline_s=0.5)
            assert time.monotonic() - began < 1.5 or not all(blocker.done() for blocker in blockers)
        for blocker in blockers:
            blocker.result()
        with pytest.raises(ValueError, match="deadline_s"):
            client.call("python", {"code": "1"}, deadline_s=0.0)


def test_every_attempt_of_a_client_says_what_is_left_of_its_deadline() -> None:
    told = list[float]()

    class Full(BaseHTTPRequestHandler):  # a service that stays full, which a real one cannot be told to
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["deadline_s"])
            self.send_response(429)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Full) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with SandboxClient(f"http://127.0.0.1:{server.server_port}") as client, pytest.raises(SandboxUnavailable):
            client.call("python", {"code": "1"}, deadline_s=3.0)
        server.shutdown()
    assert len(told) > 2
    assert told[0] <= 3.0
    assert all(before - after > 0.05 for before, after in itertools.pairwise(told))


def test_a_signal_lets_calls_in_flight_finish_and_takes_no_more(start_service: StartService) -> None:
    service = start_service({"drain_s": 5})
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


def test_what_is_offered_is_described_and_what_goes_on_is_counted(start_service: StartService) -> None:
    service = start_service(env={"TOOLS_SANDBOX_TOKEN": "open sesame"})
    description = requests.get(f"{service.url}/openapi.json", timeout=5).json()
    assert set(description["paths"]) == {"/call", "/tools", "/health", "/metrics"}
    assert "tools_sandbox" in requests.get(f"{service.url}/docs", timeout=5).text
    assert requests.get(f"{service.url}/metrics", timeout=5).status_code == 401
    with SandboxClient(service.url, token="open sesame") as client:
        client.call("python", {"code": "1"})
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
    ],
)
def test_every_malformed_body_is_told_what_is_wrong_in_few_words(service: Any, fields: str) -> None:
    body = f'{{"tool": "python", "arguments": {{"code": "1"}}, {fields}}}'
    reply = requests.post(f"{service.url}/call", data=body, headers={"Content-Type": "application/json"}, timeout=10)
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["msg"]
    assert len(reply.content) < 1000
    assert "Traceback" not in service.stderr()


def test_a_body_that_is_too_large_is_denied_before_it_is_read(start_service: StartService) -> None:
    service = start_service()
    with SandboxClient(service.url) as client, pytest.raises(SandboxDenied, match="413"):
        client.call("python", {"code": "#" * 9_000_000})
    assert requests.post(f"{service.url}/call", data=iter([b"{}"]), timeout=5).status_code == 411


def test_the_log_is_one_object_a_line_and_holds_no_arguments(start_service: StartService) -> None:
    service = start_service({"log": {"calls": True}})
    with SandboxClient(service.url) as client:
        client.call("python", {"code": "'a secret word'"}, trajectory_id="t1")
    lines = [json.loads(line) for line in service.stderr().splitlines()]
    (call,) = [line for line in lines if line["event"] == "call"]
    assert (call["tool"], call["status"], call["trajectory"]) == ("python", "ok", "t1")
    assert {"time", "level", "event"} <= set(lines[0])
    assert "a secret word" not in service.stderr()
