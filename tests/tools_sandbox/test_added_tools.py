"""Tools that users add by an entry point or an MCP server: bad ones are rejected, good ones are checked and run."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mcp
import psutil
import pytest
import requests
from mcp.types import ListToolsResult

from tests.tools_sandbox.helpers.services import running, running_calls, wait_until, wait_until_gone
from tools_sandbox.catalog import build_tools, tools_by_name
from tools_sandbox.client import SandboxClient
from tools_sandbox.config import ConfigError, McpServerConfig, PluginConfig, ToolServiceConfig
from tools_sandbox.mcp.tools import McpServer, connect

HELPERS = Path(__file__).parent / "helpers"
SERVER = {"command": sys.executable, "args": [str(HELPERS / "mcp_server.py")]}
CARELESS = str(HELPERS / "careless_mcp_server.py")
StartService = Callable[..., Any]


def tool_class(name: str, *run: str) -> str:
    """Return a file with the tool `name` (in lower case), whose argument is `text` and whose `run` has these lines."""
    return (
        "import asyncio\nfrom pydantic import BaseModel\nfrom tools_sandbox.answers import ToolResult\n"
        "from tools_sandbox.tool import Tool\nclass Text(BaseModel):\n    text: str\n"
        f"class {name}(Tool):\n    name, description, arguments = {name.lower()!r}, 'A tool.', Text\n"
        "    async def run(self, arguments, timeout_s):\n" + "".join(f"        {line}\n" for line in run)
    )


def test_unknown_plugin_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r'"count_wrods" in tools_sandbox\.tool'):
        build_tools(ToolServiceConfig(plugins=(PluginConfig("count_wrods"),)))


def test_limit_of_python_calls_cuts_no_other_tool(tmp_path: Path, start_service: StartService) -> None:
    (tmp_path / "slow.py").write_text(tool_class("Slow", "await asyncio.sleep(1)", "return ToolResult('ok', 'done')"))
    plugins = [{"name": f"{tmp_path / 'slow.py'}:Slow"}]
    service = start_service({"python": {"timeout_s": 0.3}, "plugins": plugins})
    with SandboxClient(service.url) as client:
        assert client.call("slow", {"text": ""}, timeout_s=30).text == "done"
        answer = client.call("python", {"code": "import time; time.sleep(60)"}, timeout_s=30)
        assert (answer.status, "0.3 s" in answer.text) == ("timeout", True)


def test_class_of_a_file_is_a_tool(tmp_path: Path, start_service: StartService) -> None:
    (tmp_path / "mine.py").write_text(tool_class("Reverse", "return ToolResult('ok', arguments.text[::-1])"))
    service = start_service({"plugins": [{"name": f"{tmp_path / 'mine.py'}:Reverse"}]})
    with SandboxClient(service.url) as client:
        assert client.call("reverse", {"text": "abc"}).text == "cba"
    for name, reason in (("mine.py:Revers", "AttributeError"), ("none.py:Reverse", "FileNotFoundError")):
        with pytest.raises(ConfigError, match=reason):
            build_tools(ToolServiceConfig(plugins=(PluginConfig(str(tmp_path / name)),)))


def test_cached_answers_of_other_code_or_options_are_not_reused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    file, same = tmp_path / "a" / "json.py", tmp_path / "b" / "json.py"
    code = tool_class("Tool_", "return ToolResult('ok', '')").replace("(Tool):", "(Tool):\n    size = 0")
    code += "    def __init__(self, size=0):\n        self.size = size\n"

    def fingerprint(path: Path, **options: Any) -> str:
        return build_tools(ToolServiceConfig(plugins=(PluginConfig(f"{path}:Tool_", options),)))["tool_"].fingerprint

    file.write_text(code)
    same.write_text(code)
    before = fingerprint(file)
    assert fingerprint(same) == before != fingerprint(file, size=3)
    file.write_text(code.replace("'ok', ''", "'ok', 'corrected'"))
    assert fingerprint(file) != before
    assert sys.modules["json"] is json, "a file takes the place of no module"


def test_tools_on_all_pages_of_an_mcp_list_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(name: str, after: str | None) -> ListToolsResult:
        return ListToolsResult(tools=[mcp.Tool(name=name, input_schema={"type": "object"})], next_cursor=after)

    class Pages:
        """A client of a server whose second page leads to itself."""

        async def list_tools(self, *, cursor: str | None = None) -> ListToolsResult:
            return listed("one", "2") if cursor is None else listed("two", "2")

    async def client(_self: McpServer) -> Pages:
        return Pages()

    monkeypatch.setattr(McpServer, "client", client)
    tools = asyncio.run(connect({"a": McpServerConfig(sys.executable, cache=True)}))
    assert {tool.name for tool in tools} == {"one", "two"}
    other = asyncio.run(connect({"a": McpServerConfig(sys.executable, cache=True, env={"LANGUAGE": "de"})}))
    assert tools[0].fingerprint != other[0].fingerprint, "another environment gives other answers"


@pytest.mark.parametrize(
    ("server", "parts"),
    [
        (McpServerConfig(sys.executable, args=("-c", "exit(3)")), ["mcp.a", "does not start: its process has ended"]),
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
    inherited = {"env": {"GIVEN": "1"}, "env_from": ["PAGES_KEY"]}
    service = start_service({"mcp": {"arithmetic": {**SERVER, **inherited}}}, env={**secret, "PAGES_KEY": "p"})
    with SandboxClient(service.url, token="open sesame") as client:
        assert client.call("add", {"a": 2, "b": 3}).text == "5"
        assert requests.get(f"{service.url}/health", timeout=60).json()["workers"]["alive"] == 1  # that of the server
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
        assert {"GIVEN", "PAGES_KEY"} <= names
        assert not names & set(secret)
    family = service.family()
    service.process.terminate()
    service.process.wait(60)
    wait_until(lambda: not any(each.is_running() for each in family[1:]))


def test_call_of_mcp_server_that_hangs_at_its_restart_is_broken(tmp_path: Path, start_service: StartService) -> None:
    """A model must not read as its own time limit that a server does not start."""
    hangs_later = (
        "import os, runpy, sys, time; mark, server = sys.argv[1:]; "
        "time.sleep(600) if os.path.exists(mark) else open(mark, 'w').close(); runpy.run_path(server, None, '__main__')"
    )
    args = ["-c", hangs_later, str(tmp_path / "started"), *SERVER["args"]]
    service = start_service({"mcp": {"arithmetic": {"command": sys.executable, "args": args}}})
    with SandboxClient(service.url, retries=0) as client:
        assert client.call("add", {"a": 2, "b": 3}).text == "5"
        client.call("end", {})
        answer = client.call("add", {"a": 2, "b": 3}, timeout_s=2)
    assert (answer.status, answer.failure) == ("error", "temporary"), "nothing was sent: the call may be repeated"


@pytest.fixture(scope="module")
def careless() -> Iterator[Any]:
    """A service with an MCP server that violates the protocol."""
    with running({"mcp": {"careless": {"command": sys.executable, "args": [CARELESS], "max_chars": 1000}}}) as service:
        yield service


def test_bad_mcp_answer_fails_only_its_call(careless: Any) -> None:
    with SandboxClient(careless.url, retries=0) as client, ThreadPoolExecutor(1) as pool:
        pid = client.call("pid", {}).text
        slow = pool.submit(client.call, "slow", {})
        for name in ("liar", "unknown"):
            wrong = client.call(name, {"a": 1})
            assert (wrong.status, "not the fault" in wrong.text) == ("error", True)
        for size in (2_000_000, 10_000_000):
            cut = client.call("large", {"bytes": size}, timeout_s=60)
            assert (cut.status, len(cut.text) < 1100, f"{size} characters in all" in cut.text) == ("ok", True, True)
        assert slow.result().text == "slept"
        assert client.call("pid", {}).text == pid  # it was not restarted


@pytest.mark.parametrize(("name", "arguments"), [("garbage", {}), ("large", {"bytes": 17 << 20})])
def test_mcp_answer_that_cannot_be_read_fails_at_once(careless: Any, name: str, arguments: dict[str, int]) -> None:
    with SandboxClient(careless.url, retries=0) as client:
        pid = client.call("pid", {}).text
        failed = client.call(name, arguments, timeout_s=30)
        assert (failed.status, "not the fault" in failed.text) == ("error", True)
        assert client.call("pid", {}, timeout_s=60).text not in (pid, failed.text)  # a restarted server
    assert "invalid message" in careless.stderr()


RAW_ANSWERS = {
    "lone surrogate": (r'"id":$ID,"result":{"content":[{"type":"text","text":"a\ud800b"}]}', "ok", "a?b"),
    "error without id": ('"id":null,"error":{"code":-32700,"message":"cannot read"}', "error", "cannot read"),
}


@pytest.mark.parametrize("kind", RAW_ANSWERS)
def test_odd_mcp_answer_costs_neither_server_nor_time(careless: Any, kind: str) -> None:
    content, status, text = RAW_ANSWERS[kind]
    line = f'{{"jsonrpc":"2.0",{content}}}\n'.encode()
    with SandboxClient(careless.url, retries=0) as client:
        pid = client.call("pid", {}).text
        answer = client.call("raw", {"hex": line.hex()}, timeout_s=20)
        assert answer.status == status and text in answer.text, answer
        assert client.call("pid", {}).text == pid


def test_old_mcp_server_is_asked_once_for_newest_protocol(start_service: StartService) -> None:
    """A server that ignores the question costs ten seconds each time."""
    service = start_service({"mcp": {"careless": {"command": sys.executable, "args": [CARELESS]}}})
    with SandboxClient(service.url, retries=0) as client:
        assert client.call("first", {}).text == "server/discover"
        client.call("garbage", {}, timeout_s=30)  # ends the connection
        assert client.call("first", {}, timeout_s=60).text == "initialize"


def test_mcp_answer_of_many_parts_does_not_occupy_service(careless: Any) -> None:
    service = psutil.Process(careless.process.pid)
    with SandboxClient(careless.url, retries=0) as client:
        client.call("pid", {})
        before_s = service.cpu_times().user
        assert client.call("parts", {"count": 40_000}, timeout_s=60).status == "ok"
        assert service.cpu_times().user - before_s < 0.5  # parsing takes seconds


@pytest.mark.parametrize("with_workers", [False, True], ids=["service", "service and workers"])
def test_no_process_of_mcp_server_survives_killed_service(start_service: StartService, with_workers: bool) -> None:
    program = f"setsid sleep 1000 & {sys.executable} {SERVER['args'][0]}; true"  # the server is a child of the shell
    service = start_service({"mcp": {"arithmetic": {"command": "sh", "args": ["-c", program]}}})
    with ThreadPoolExecutor(1) as pool, SandboxClient(service.url, retries=0) as client:
        call = pool.submit(client.call, "wait", {"seconds": 60}, timeout_s=60)
        wait_until(lambda: running_calls(service) == 1)
        time.sleep(0.5)  # the server sleeps, and reads nothing
        family = service.family()
        commands = [" ".join(each.cmdline()) for each in family]
        assert "sleep 1000" in commands and any(command.startswith(sys.executable) for command in commands)
        for victim in [psutil.Process(service.process.pid), *(service.workers() if with_workers else [])]:
            victim.kill()
        wait_until_gone(family)
        assert call.exception() is not None
