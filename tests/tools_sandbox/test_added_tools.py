"""Tools that users add by an entry point or an MCP server: bad ones are rejected, good ones are checked and run."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools_sandbox.helpers.services import wait_until
from tools_sandbox.catalog import build_tools, tools_by_name
from tools_sandbox.client import SandboxClient
from tools_sandbox.config import ConfigError, McpServerConfig, PluginConfig, SandboxConfig
from tools_sandbox.mcp.relay import TOO_LONG, relay
from tools_sandbox.mcp.tools import connect

HELPERS = Path(__file__).parent / "helpers"
SERVER = {"command": sys.executable, "args": [str(HELPERS / "mcp_server.py")]}
CARELESS = str(HELPERS / "careless_mcp_server.py")
StartService = Callable[..., Any]


def test_unknown_plugin_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r'"count_wrods" in tools_sandbox\.tool'):
        build_tools(SandboxConfig(plugins=(PluginConfig("count_wrods"),)))


@pytest.mark.parametrize(
    ("server", "parts"),
    [
        (McpServerConfig(sys.executable, args=("-c", "exit(3)")), ["mcp.a", "does not start"]),
        (McpServerConfig("/no/such/program"), ["mcp.a", "/no/such/program"]),
        (McpServerConfig(sys.executable, args=(CARELESS,), tools=("sub",)), ['"sub"', "slow"]),
        (
            McpServerConfig(sys.executable, args=(CARELESS, "--broken-schema")),
            ['"broken"', "properties.a.type", "leave the tool out"],
        ),
    ],
    ids=["ends", "missing program", "missing tool", "invalid schema"],
)
def test_unusable_mcp_server_is_a_config_error(server: McpServerConfig, parts: list[str]) -> None:
    async def run() -> None:
        tools = await connect({"a": server})
        try:
            tools_by_name(tools)
        finally:
            for tool in tools:
                await tool.stop()

    with pytest.raises(ConfigError) as caught:
        asyncio.run(run())
    assert len(str(caught.value).splitlines()) == 1
    for part in parts:
        assert part in str(caught.value)


def test_mcp_tools_are_checked_and_survive_server_death(start_service: StartService) -> None:
    secret = {"TOOLS_SANDBOX_TOKEN": "open sesame", "WANDB_API_KEY": "k"}
    service = start_service({"mcp": {"arithmetic": {**SERVER, "env": {"GIVEN": "1"}}}}, env=secret)
    with SandboxClient(service.url, token="open sesame") as client:
        assert client.call("add", {"a": 2, "b": 3}).text == "5"
        wrong = client.call("add", {"a": "two"})
        assert (wrong.status, '"a"' in wrong.text, "'b'" in wrong.text) == ("error", True, True)
        failed = client.call("fail", {})
        assert (failed.status, "as asked" in failed.text) == ("error", True)
        slow = client.call("wait", {"seconds": 30}, timeout_s=0.5)
        assert slow.status == "timeout"
        ended = client.call("end", {})
        assert (ended.status, "not the fault" in ended.text) == ("error", True)
        assert client.call("add", {"a": 20, "b": 30}, timeout_s=60).text == "50"  # by a restarted server
        names = set(client.call("environment", {}).text.split())
        assert "GIVEN" in names
        assert not names & set(secret)
    family = service.family()
    service.process.terminate()
    service.process.wait(60)
    wait_until(lambda: not any(each.is_running() for each in family[1:]))


def test_bad_mcp_answer_fails_only_its_call(start_service: StartService) -> None:
    server = {"command": sys.executable, "args": [CARELESS], "max_chars": 1000}
    service = start_service({"mcp": {"careless": server}})
    with SandboxClient(service.url, retries=0) as client, ThreadPoolExecutor(1) as pool:
        pid = client.call("pid", {}).text
        slow = pool.submit(client.call, "slow", {})
        for name in ("liar", "unknown"):
            wrong = client.call(name, {"a": 1})
            assert (wrong.status, "not the fault" in wrong.text) == ("error", True)
        cut = client.call("large", {"bytes": 2_000_000})
        assert (cut.status, len(cut.text) < 1100, "2000000 characters in all" in cut.text) == ("ok", True, True)
        for name in ("large", "id_last"):
            long = client.call(name, {"bytes": 5_000_000}, timeout_s=60)
            assert (long.status, "too long" in long.text) == ("error", True)
        assert client.call("id_hidden", {"bytes": 5_000_000}, timeout_s=1.0).status == "timeout"
        assert slow.result().text == "slept"
        assert client.call("pid", {}).text == pid  # it was not restarted
    assert "answers no request" in service.stderr()


@given(st.binary(max_size=300).filter(lambda end: b"\n" not in end), st.lists(st.integers(0, 200), max_size=6))
def test_relay_passes_only_lines_within_bound(end: bytes, sizes: list[int]) -> None:
    lines = [b"x" * size + b"\n" for size in sizes]
    out = io.BytesIO()
    relay(io.BytesIO(b"".join(lines) + end), out, 100)
    expected = [line for line in lines if len(line) <= 101] + [end] * (len(end) <= 100)
    assert out.getvalue() == b"".join(expected)


@pytest.mark.parametrize("request_id", [7, "seven"])
def test_relay_replaces_too_long_answer_by_error(request_id: int | str) -> None:
    long = {"content": "y" * 1000, "id": 3, "inner": {"id": 4}, "quoted": ',"id":5}'}
    id_first = {"jsonrpc": "2.0", "id": request_id, "result": long}
    id_last = {"result": long, "jsonrpc": "2.0", "id": request_id}
    for message in (id_first, id_last):
        out = io.BytesIO()
        relay(io.BytesIO(json.dumps(message).encode() + b"\n{}\n"), out, 100)
        error, after = out.getvalue().splitlines()
        assert (json.loads(error)["id"], json.loads(error)["error"]["code"], after) == (request_id, TOO_LONG, b"{}")


def test_relay_drops_too_long_server_request() -> None:
    for message in ({"jsonrpc": "2.0", "id": 7, "method": "y" * 1000}, {"method": "y" * 1000, "id": 7}):
        out = io.BytesIO()
        relay(io.BytesIO(json.dumps(message).encode() + b"\n"), out, 100)
        assert not out.getvalue()
