"""The intake: callers without the token, and bodies that do not arrive, cost no memory and delay no caller."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
import requests
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from tests.tools_sandbox.helpers.services import running
from tools_sandbox.client import SandboxClient
from tools_sandbox.service.connection import Connection
from tools_sandbox.service.intake import Intake
from tools_sandbox.utils.logs import RarerAndRarer, TextFormatter

TOKEN = "open sesame"
BODY_BYTES = 8_000_000


@pytest.fixture(scope="module")
def guarded() -> Iterator[Any]:
    """A service with a token that may open 256 files."""
    config = {"max_concurrency": 8, "workers": 1}
    with running(config, open_files=256, env={"TOOLS_SANDBOX_TOKEN": TOKEN}) as service:
        yield service


def begin(service: Any, token: str, body: bytes = b"") -> socket.socket:
    """Open a connection, and send the headers of a large request and the beginning of its body."""
    connection = socket.create_connection(("127.0.0.1", int(service.url.rsplit(":", 1)[1])), timeout=30)
    head = f"POST /call HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {BODY_BYTES}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_service_without_token_says_who_may_call(guarded: Any) -> None:
    line = "no token (TOOLS_SANDBOX_TOKEN): every process of this machine may call"
    assert line not in guarded.stderr()
    with running({"workers": 1}, env={"TOOLS_SANDBOX_TOKEN": ""}) as service:
        assert service.stderr().count(line) == 1


def test_wrong_token_is_refused_before_body_arrives(guarded: Any) -> None:
    with ExitStack() as stack:
        strangers = [stack.enter_context(begin(guarded, "wrong")) for _ in range(40)]
        assert {each.recv(1 << 16).split(b"\r\n")[0] for each in strangers} == {b"HTTP/1.1 401 Unauthorized"}
        with SandboxClient(guarded.url, TOKEN) as client:
            assert client.call("python", {"code": "6 * 7"}).text == "42"


def test_incomplete_bodies_starve_no_caller(guarded: Any) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(begin(guarded, TOKEN, body=b'{"tool": '))
        assert requests.get(f"{guarded.url}/health", timeout=30).json()["status"] == "ok"
        with SandboxClient(guarded.url, TOKEN) as client:
            assert client.call("python", {"code": "6 * 7"}).text == "42"


def test_strangers_cannot_fill_or_forge_the_log(guarded: Any) -> None:
    """Without a token: requests that are no HTTP, forged lines in path and headers, upgrades, wrong tokens."""
    before, forged = len(guarded.stderr()), b'{"level": "info", "event": "forged"}'
    port = int(guarded.url.rsplit(":", 1)[1])
    requests_of_strangers = (
        b"\n" + forged + b"\n\r\n\r\n",
        b"GET /%0a" + forged.replace(b" ", b"%20") + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: a\x1b[2J\r\n" + forged + b"\r\n\r\n",
        b"GET /tools HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    )
    for _ in range(20):
        for each in requests_of_strangers:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(each)
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 4")
    lines = guarded.stderr()[before:].splitlines()
    assert len(lines) <= 18 and not any("forged" in line or "\x1b" in line for line in lines), lines


def test_text_log_has_one_line_per_record_of_a_stranger() -> None:
    formatter, rarer = TextFormatter(), RarerAndRarer()

    def record(text: str, level: int = logging.WARNING) -> logging.LogRecord:
        return logging.LogRecord("uvicorn.error", level, "", 0, text, None, None)

    assert (
        formatter.format(record("a\ntools_sandbox: ready\x1b[2J")) == "tools_sandbox: a\\ntools_sandbox: ready\\x1b[2J"
    )
    try:
        raise ValueError("x\ntools_sandbox: ready")
    except ValueError as error:
        failed = record("failed")
        failed.exc_info = (ValueError, error, error.__traceback__)
    assert [line[:3] for line in formatter.format(failed).splitlines()[1:]] == ["  |"] * 5
    written = [each.getMessage() for each in (record("bad") for _ in range(9)) if rarer.filter(each)]
    assert written == ["bad", *(f"bad (warning {count} of this kind)" for count in (2, 4, 8))]
    assert all(rarer.filter(record("broken", logging.ERROR)) for _ in range(9))


def test_headers_have_a_deadline() -> None:
    """A connection without headers is cut. A request in parts is answered, and so is the next one."""

    class Impatient(Connection):
        headers_s = 1.0

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(1.5)  # longer than the headers may take
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def replies(server: asyncio.Server, parts: list[bytes]) -> list[bytes]:
        """Send parts, each after the reply to the one before; return the last line of each reply."""
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        lines = []
        for part in parts:
            writer.write(part)
            lines.append((await reader.readuntil(b"ok") if part.endswith(b"\r\n\r\n") else await reader.read())[-2:])
        writer.close()
        return lines

    async def run() -> list[list[bytes]]:
        config, state = uvicorn.Config(answer, ws="none", log_config=None), ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Impatient(config, state, {}), "127.0.0.1")
        whole, partial = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nHo"
        async with server:
            return list(
                await asyncio.gather(
                    *(replies(server, parts) for parts in ([b""], [partial], [whole, partial], [whole, whole]))
                )
            )

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [[b""], [b""], [b"ok", b""], [b"ok", b"ok"]]


class Caller:
    """A request to an intake, whose body the test sends in parts."""

    def __init__(self, intake: Intake, address: str = "10.0.0.1") -> None:
        self._body: asyncio.Queue[Message] = asyncio.Queue()
        self.status = 0
        scope: Scope = {"type": "http", "path": "/call", "headers": [], "client": (address, 1)}
        self.done = asyncio.ensure_future(intake(scope, self._body.get, self._note))

    async def _note(self, message: Message) -> None:
        self.status = message.get("status", self.status)

    def send(self, size: int, *, more: bool = False) -> None:
        self._body.put_nowait({"type": "http.request", "body": bytes(size), "more_body": more})


async def answer_when_released(scope: Scope, receive: Receive, send: Send) -> None:
    """Act as the application: read the body, then answer when the caller sends one more message."""
    body = (await receive())["body"]
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def test_body_has_a_deadline() -> None:
    async def run() -> int:
        caller = Caller(Intake(answer_when_released, None, body_s=0.05))
        caller.send(10, more=True)
        await caller.done
        return caller.status

    assert asyncio.run(asyncio.wait_for(run(), 60)) == 408


def test_body_of_a_stranger_is_discarded_until_a_deadline() -> None:
    async def run() -> int:
        caller = Caller(Intake(answer_when_released, TOKEN, body_s=0.05))
        caller.send(10, more=True)  # the rest does not arrive
        await caller.done
        return caller.status

    assert asyncio.run(asyncio.wait_for(run(), 60)) == 401


def test_chunks_of_a_stranger_are_not_read() -> None:
    """Parsing chunks of one byte would keep the event loop busy."""

    async def run() -> list[int]:
        async def receive() -> Message:
            raise AssertionError("the body is read")

        async def send(message: Message) -> None:
            if "status" in message:
                found.append(message["status"])

        found: list[int] = []
        headers = [(b"transfer-encoding", b"chunked")]
        scope: Scope = {"type": "http", "path": "/call", "headers": headers, "client": None}
        for token in (TOKEN, None):
            await Intake(answer_when_released, token)(scope, receive, send)
        return found

    assert asyncio.run(run()) == [401, 411]


def test_closed_connections_leave_no_memory() -> None:
    """Each request has the largest headers, about 1.5 MiB when parsed."""
    with running({"workers": 1}, env={"TOOLS_SANDBOX_TOKEN": TOKEN}) as service:
        address, memory = ("127.0.0.1", int(service.url.rsplit(":", 1)[1])), psutil.Process(service.process.pid)
        before = memory.memory_info().rss
        for _ in range(80):
            with socket.create_connection(address, timeout=30) as connection:
                connection.sendall(b"GET /tools HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 12_000 + b"\r\n")
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 401")
        assert memory.memory_info().rss - before < 70 << 20


@pytest.mark.parametrize(("limits", "other"), [({"max_peer_bytes": 100}, 200), ({"max_bytes": 100}, 429)])
def test_unanswered_bodies_are_bounded(limits: dict[str, int], other: int) -> None:
    async def run() -> list[int]:
        intake = Intake(answer_when_released, None, **limits)
        first, second, third = Caller(intake), Caller(intake), Caller(intake, "10.0.0.2")
        first.send(80)
        await asyncio.sleep(0)
        for caller in (second, third):
            caller.send(15, more=True)
            caller.send(15)
            caller.send(0)
        await asyncio.gather(second.done, third.done)
        first.send(0)
        await first.done
        after = Caller(intake)  # the first body counts no more
        after.send(80)
        after.send(0)
        await after.done
        return [each.status for each in (first, second, third, after)]

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [200, 429, other, 200]
