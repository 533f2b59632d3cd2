"""Wire formats: whatever arrives in a request, a frame or an MCP answer, the service answers it and the next one.

`make test` tries a few examples of each property, the same each time; the campaign draws new ones for ten minutes.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools_sandbox.helpers.services import RunCode, python_pool, running
from tools_sandbox.client import SandboxClient
from tools_sandbox.config import Limits
from tools_sandbox.python_tool.protocol import CHUNK, Outcome, Request, read_exactly, read_head
from tools_sandbox.utils import frames

CARELESS = Path(__file__).parent / "helpers" / "careless_mcp_server.py"
CAMPAIGN_S = 600.0
STEP = settings(max_examples=50, derandomize=False, database=None, print_blob=True)
"""Examples of the campaign between two looks at the clock."""


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    """A service with the python tool and those of an MCP server that writes what its caller wants."""
    server = {"command": sys.executable, "args": [str(CARELESS)], "max_chars": 1000}
    with running({"mcp": {"careless": server}, "workers": 1, "limits": {"time_s": 20}}) as started:
        yield started
        with SandboxClient(started.url) as client:
            assert client.call("python", {"code": "6 * 7"}).text == "42"
        assert "tool failed" not in started.stderr()  # the event of an error that no code expects


@pytest.fixture(scope="module")
def run_code() -> Iterator[RunCode]:
    with python_pool(Limits(state_mib=1, output_mib=1)) as run:
        yield run


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


TEXT = st.text(st.characters(), max_size=20)  # includes lone surrogates
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))
DEEP = st.integers(1, 1100).map(nested)
DURATIONS = st.floats() | st.sampled_from([1e-300, 0.01, 1.0, 1e300, 0, -1])
CALLS = st.fixed_dictionaries(
    {},
    optional={
        "tool": st.sampled_from(["python", "pid", "raw", "none"]) | JSON,
        "arguments": st.fixed_dictionaries({"code": TEXT}) | st.fixed_dictionaries({"a": DEEP}) | JSON,
        "trajectory_id": TEXT | JSON,
        "request_id": st.sampled_from(["", "1"]) | JSON,
        "timeout_s": DURATIONS | JSON,
        "deadline_s": DURATIONS | JSON,
        "other": JSON,
    },
)
BODIES = st.binary(max_size=200) | st.one_of(CALLS, JSON, DEEP).map(lambda value: json.dumps(value).encode())
NAMES = st.text("abcXYZ-_1!", min_size=1, max_size=8)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=20)
HEADERS = st.tuples(NAMES, VALUES) | st.sampled_from(
    [
        ("Transfer-Encoding", "chunked"),
        ("Transfer-Encoding", "gzip, chunked"),
        ("Content-Length", "0"),
        ("Content-Length", "-1"),
        ("Content-Length", "9" * 30),
        ("Content-Encoding", "gzip"),
        ("Content-Type", "text/plain"),
        ("Content-Type", 'multipart/form-data; boundary="'),
        ("Expect", "100-continue"),
        ("Upgrade", "websocket"),
        ("Connection", "upgrade"),
        ("Authorization", "Bearer \xff"),
        ("Host", "y"),
    ]
)
METHODS = st.sampled_from(["POST", "GET", "PUT", "HEAD", "OPTIONS", "X"])
PATHS = st.sampled_from(["/call", "/tools", "/health", "/metrics", "/", "/call?x=%ff", "/%00", "*", "//call"])


@st.composite
def http_requests(draw: Any) -> tuple[str, bytes]:
    """Draw a method, and a request; one of its headers has the length of its body."""
    method, path = draw(METHODS | st.just("POST")), draw(PATHS | st.just("/call"))
    body = draw(BODIES)
    drawn = draw(st.lists(HEADERS, max_size=3))
    lines = [("Host", "x"), ("Content-Type", "application/json"), ("Content-Length", str(len(body))), *drawn]
    head = "".join(f"{name}: {value}\r\n" for name, value in lines)
    return method, f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def connect(service: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(service.url.rsplit(":", 1)[1])), timeout=60)


@given(http_requests())
def check_http(service: Any, request: tuple[str, bytes]) -> None:
    """Every request gets an answer, and none of them shows a fault of the service."""
    method, content = request
    with connect(service) as connection:
        connection.sendall(content)
        answer = http.client.HTTPResponse(connection, method=method)
        answer.begin()
        assert 200 <= answer.status < 500 or answer.status == 504, answer.read()


@st.composite
def damaged(draw: Any, contents: st.SearchStrategy[bytes]) -> bytes:
    """Draw a message of which parts are lost, doubled or replaced."""
    content = draw(contents)
    for _ in range(draw(st.integers(1, 3))):
        start, end = sorted(draw(st.tuples(*[st.integers(0, len(content))] * 2)))
        part = draw(st.just(b"") | st.just(2 * content[start:end]) | st.binary(max_size=8))
        content = content[:start] + part + content[end:]
    return content


@given(damaged(http_requests().map(lambda request: request[1])))
def check_damaged_http(service: Any, content: bytes) -> None:
    """A request that breaks the rules of HTTP disturbs no other."""
    with connect(service) as connection:
        answer = b""
        with suppress(ConnectionError):
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                answer += part
    assert not answer or answer.startswith(b"HTTP/1.1 "), answer
    assert not answer.startswith(b"HTTP/1.1 500"), answer
    assert requests.get(f"{service.url}/health", timeout=60).json()["status"] == "ok"


MESSAGES = st.dictionaries(TEXT, JSON, max_size=4).filter(lambda value: value == value)  # no NaN


@given(st.lists(MESSAGES, max_size=4), st.integers(1, 40))
def check_frames(messages: list[dict[str, Any]], part_bytes: int) -> None:
    """Messages between service and workers arrive as they were sent, in whatever parts."""

    async def run() -> list[Any]:
        reader = asyncio.StreamReader()
        sent = b"".join(map(frames.encode, messages))
        for start in range(0, len(sent), part_bytes):
            reader.feed_data(sent[start : start + part_bytes])
        reader.feed_eof()
        return [await frames.receive(reader) for _ in range(len(messages) + 1)]

    assert asyncio.run(run()) == [*json.loads(json.dumps(messages)), None]


@given(damaged(MESSAGES.map(frames.encode)))
def check_damaged_frames(content: bytes) -> None:
    """A damaged stream of frames ends; it raises nothing that would leave its worker in the pool."""

    async def run() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        while (message := await frames.receive(reader)) is not None:
            assert isinstance(message, dict)

    asyncio.run(run())


@given(TEXT, st.binary(max_size=50), st.integers(1, 40), st.data())
def check_call_messages(text: str, state: bytes, part_bytes: int, data: st.DataObject) -> None:
    """Requests and outcomes of python calls arrive as they were sent, or are known to be incomplete."""
    request = Request(code=text, time_s=1.5, output_chars=1, output_mib=1)
    stream = io.BytesIO(sent := request.encode(len(state)) + state)
    head = read_head(lambda size: stream.read(min(size, part_bytes)))
    assert head is not None and head[1] == len(state)
    assert (Request.decode(head[0]), read_exactly(stream.read, head[1])) == (request, state)
    assert read_head(io.BytesIO(sent[: data.draw(st.integers(0, len(head[0]) - 1))]).read) is None
    outcome = Outcome("ok", text, has_state=True)
    body = outcome.encode()[CHUNK.size :]
    assert Outcome.decode(body) == outcome
    with pytest.raises(ValueError, match="line 1 column"):
        Outcome.decode(body[: data.draw(st.integers(0, len(body) - 1))])


ON_DESCRIPTORS = "import os\nfor number, content in {}:\n    os.write(number, content)\n{}"


@given(st.lists(st.tuples(st.integers(1, 3), st.binary(max_size=60)), max_size=4), st.sampled_from(["", "os._exit(0)"]))
def check_output_of_code(run_code: RunCode, writes: list[tuple[int, bytes]], end: str) -> None:
    """Bytes that code writes to its channels can break neither its call nor the one that begins with its state."""
    with tempfile.TemporaryFile() as kept:
        outcome = run_code(ON_DESCRIPTORS.format(writes, end), keep=kept)
        assert outcome.status in ("ok", "error")
        if outcome.has_state:
            assert run_code("6 * 7", state=kept).status in ("ok", "error")
    assert run_code("6 * 7").text == "42"


KEYS = st.sampled_from(["jsonrpc", "id", "method", "params", "result", "error", "content", "type", "text", "code", "x"])
RPC_VALUES = st.sampled_from(
    ["2.0", "$ID", "text", "image", "ping", "notifications/progress", "notifications/tools/list_changed", -32603]
)
RPC = st.recursive(
    RPC_VALUES | SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5)
)
CONTENT = st.lists(st.fixed_dictionaries({"type": RPC_VALUES, "text": RPC}) | RPC, max_size=3)
ANSWERS = st.one_of(
    RPC,
    DEEP.map(lambda value: {"jsonrpc": "2.0", "id": "$ID", "result": {"content": [], "x": value}}),
    st.fixed_dictionaries(
        {"jsonrpc": st.just("2.0"), "id": st.just("$ID") | RPC},
        optional={
            "result": st.fixed_dictionaries({"content": CONTENT}, optional={"isError": RPC, "structuredContent": RPC}),
            "error": st.fixed_dictionaries({"code": RPC, "message": RPC}, optional={"data": RPC}) | RPC,
            "method": RPC,
            "params": RPC,
        },
    ),
).map(lambda value: json.dumps(value).encode().replace(b'"$ID"', b"$ID"))
LINES = ANSWERS | damaged(ANSWERS) | st.binary(max_size=40)


@given(st.lists(LINES.map(lambda line: line + b"\n"), max_size=3).map(b"".join))
def check_mcp(service: Any, content: bytes) -> None:
    """Whatever an MCP server writes before its answer, the call ends, and so does the next one, with its answer."""
    with SandboxClient(service.url, retries=0) as client:
        assert client.call("raw", {"hex": content.hex()}, timeout_s=20).status in ("ok", "error")
        assert client.call("pid", {}, timeout_s=20).status == "ok"


CHECKS: dict[Callable[..., None], str] = {
    check_http: "service",
    check_damaged_http: "service",
    check_frames: "",
    check_damaged_frames: "",
    check_call_messages: "",
    check_output_of_code: "run_code",
    check_mcp: "service",
}
"""Properties, each with the fixture that it needs."""


def arguments(request: pytest.FixtureRequest, check: Callable[..., None]) -> list[Any]:
    return [request.getfixturevalue(CHECKS[check])] if CHECKS[check] else []


@pytest.mark.parametrize("check", CHECKS)
def test_wire_format(request: pytest.FixtureRequest, check: Callable[..., None]) -> None:
    check(*arguments(request, check))


@pytest.mark.slow_campaign
@pytest.mark.parametrize("check", CHECKS)
def test_wire_format_on_new_examples(request: pytest.FixtureRequest, check: Callable[..., None]) -> None:
    check_some, fixtures = STEP(check), arguments(request, check)
    deadline = time.monotonic() + CAMPAIGN_S / len(CHECKS)
    while time.monotonic() < deadline:
        check_some(*fixtures)
