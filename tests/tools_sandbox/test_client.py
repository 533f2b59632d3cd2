"""The clients: both give the same answers, and clear errors if there is none."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.tools_sandbox.helpers.served import serving
from tools_sandbox.client import AsyncSandboxClient, SandboxClient, SandboxDenied, SandboxUnavailable, ToolAnswer


def test_many_threads_and_coroutines_get_their_own_answers(service: Any, client: SandboxClient) -> None:
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda i: client.call("python", {"code": f"{i} * 2"}), range(32)))
    assert [answer.text for answer in answers] == [str(2 * i) for i in range(32)]

    async def many() -> list[ToolAnswer]:
        async with AsyncSandboxClient(service.url) as async_client:
            return await asyncio.gather(*(async_client.call("python", {"code": f"{i} * 3"}) for i in range(128)))

    assert [answer.text for answer in asyncio.run(many())] == [str(3 * i) for i in range(128)]


def test_slow_call_does_not_block_others(service: Any) -> None:
    async def race() -> None:
        async with AsyncSandboxClient(service.url) as async_client:
            slow = asyncio.create_task(
                async_client.call("python", {"code": "import time; time.sleep(60)"}, timeout_s=60)
            )
            await asyncio.gather(*(async_client.call("search", {"query": f"fact{i}"}) for i in range(20)))
            await async_client.call("python", {"code": "1"})
            assert not slow.done()
            slow.cancel()

    asyncio.run(race())


def test_unknown_tool_is_refused_with_list_of_tools(client: SandboxClient) -> None:
    for name in ("browse", "\ud800", ""):
        answer = client.call(name, {"url": "x"})
        assert answer.status == "refused"
        assert "python, search" in answer.text


@pytest.mark.parametrize(
    ("tool", "arguments", "named"),
    [
        ("python", {}, '"code"'),
        ("python", {"code": 5}, '"code"'),
        ("python", {"code": "1", "extra": 1}, '"extra"'),
        ("python", {"code": "'\ud800'"}, "surrogates not allowed"),
        ("search", {"k": 3}, '"query"'),
        ("search", {"query": "x", "k": 0}, '"k"'),
        ("search", {"query": "x", "k": "many"}, '"k"'),
        ("search", {"query": "  "}, '"query"'),
    ],
)
def test_bad_arguments_are_named(client: SandboxClient, tool: str, arguments: dict[str, object], named: str) -> None:
    answer = client.call(tool, arguments)
    assert answer.status == "error"
    assert named in answer.text


def test_unreachable_service_raises_after_bounded_retries() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        began = time.monotonic()
        with SandboxClient(url, retries=2) as client, pytest.raises(SandboxUnavailable, match="3 attempt"):
            client.call("python", {"code": "1"})

        async def call_async() -> None:
            async with AsyncSandboxClient(url, retries=2) as client:
                await client.call("python", {"code": "1"})

        with pytest.raises(SandboxUnavailable, match="3 attempt"):
            asyncio.run(call_async())
        assert time.monotonic() - began < 30


def test_address_without_scheme_raises() -> None:
    for client in (SandboxClient, AsyncSandboxClient):
        with pytest.raises(ValueError, match="http://"):
            client("127.0.0.1:8000")


def test_silent_service_counts_as_unavailable() -> None:
    def call(url: str) -> None:
        with SandboxClient(url, queue_wait_s=0.2) as client:
            client.call("python", {"code": "1"}, timeout_s=0.2)

    async def call_async(url: str) -> None:
        async with AsyncSandboxClient(url, queue_wait_s=0.2) as client:
            await client.call("python", {"code": "1"}, timeout_s=0.2)

    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        plain = pool.submit(call, url)
        with pytest.raises(SandboxUnavailable):
            asyncio.run(call_async(url))
        assert isinstance(plain.exception(), SandboxUnavailable)


def test_malformed_request_is_denied_without_retry(service: Any, client: SandboxClient) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        client.call("python", {"code": "1"}, timeout_s=0)
    with pytest.raises(SandboxDenied, match="422"):
        client.call("python", ["not", "a", "mapping"])  # type: ignore[arg-type]  # on purpose
    with SandboxClient(f"{service.url}/elsewhere") as lost, pytest.raises(SandboxDenied, match="404"):
        lost.call("python", {"code": "1"})


def test_reply_of_another_program_is_denied() -> None:
    """It redirects without end."""

    async def around(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/call")

    app = web.Application()
    app.router.add_post("/call", around)

    async def call_async(url: str) -> None:
        async with AsyncSandboxClient(url) as client:
            await client.call("python", {"code": "1"})

    with serving(app) as port:
        url = f"http://127.0.0.1:{port}"
        with SandboxClient(url) as client, pytest.raises(SandboxDenied, match="does not speak"):
            client.call("python", {"code": "1"})
        with pytest.raises(SandboxDenied, match="does not speak"):
            asyncio.run(call_async(url))


def test_client_can_be_used_after_close(service: Any) -> None:
    client = SandboxClient(service.url)
    for _ in range(2):
        assert client.call("python", {"code": "1"}).text == "1"
        client.close()


def test_tools_and_health_describe_service(service: Any, client: SandboxClient) -> None:
    client.call("python", {"code": "1"}, trajectory_id="t")
    tools = {tool["name"]: tool for tool in requests.get(f"{service.url}/tools", timeout=5).json()}
    assert set(tools) == {"python", "search"}
    assert tools["python"]["arguments"]["required"] == ["code"]
    health = requests.get(f"{service.url}/health", timeout=5).json()
    assert health["status"] == "ok"
    assert health["answered"]["python.ok"] > 0
    assert "level " in health["isolation"]


ANSWERS = st.builds(
    ToolAnswer,
    text=st.text(),
    status=st.sampled_from(["ok", "error", "timeout", "refused"]),
    seconds=st.floats(0, 1e6),
    cached=st.booleans(),
)


@given(ANSWERS)
def test_answer_round_trips_through_dict(answer: ToolAnswer) -> None:
    assert ToolAnswer.from_dict(answer.to_dict()) == answer


@given(ANSWERS, st.sampled_from(["text", "status", "seconds", "cached"]), st.none() | st.just([]) | st.just("odd"))
def test_damaged_answer_is_rejected(answer: ToolAnswer, name: str, value: object) -> None:
    if name == "text" and value == "odd":
        value = 3
    with pytest.raises(ValueError, match="not a tool answer"):
        ToolAnswer.from_dict({**answer.to_dict(), name: value})
