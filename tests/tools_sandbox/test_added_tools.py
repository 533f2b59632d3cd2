"""Tools that users add: by an entry point, by an MCP server. Each is offered, checked and run like one of ours."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from tests.tools_sandbox.test_service_process import refused_start, wait_until
from tools_sandbox.client import SandboxClient
from tools_sandbox.mcp.relay import TOO_LONG, relay

ROOT = Path(__file__).resolve().parents[2]
SERVER = {"command": sys.executable, "args": [str(Path(__file__).with_name("mcp_server.py"))]}
CARELESS = {"command": sys.executable, "args": [str(Path(__file__).with_name("careless_mcp_server.py"))]}
StartService = Callable[..., Any]


@pytest.fixture(scope="module")
def installed_example(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The example package, installed into a folder that PYTHONPATH can name."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", target]
    source = tmp_path_factory.mktemp("source")  # building leaves files beside the sources
    for path in (ROOT / "examples" / "count_words_tool").rglob("*"):
        if path.suffix in {".py", ".toml"}:
            copy = source / path.relative_to(ROOT / "examples" / "count_words_tool")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text())
    subprocess.run([*pip, source], check=True)
    return str(target)


def test_the_example_package_adds_a_tool(start_service: StartService, installed_example: str) -> None:
    config = {"plugins": [{"name": "count_words", "options": {"shortest": 3}}], "workers": 1}
    service = start_service(config, env={"PYTHONPATH": f"{installed_example}:{ROOT}"})
    with SandboxClient(service.url) as client:
        answer = client.call("count_words", {"text": "one or two or three"})
        assert (answer.status, answer.text) == ("ok", "3")
        assert client.call("count_words", {"text": "one or two or three"}).cached
        wrong = client.call("count_words", {"txt": "one"})
        assert (wrong.status, '"text"' in wrong.text) == ("error", True)
    (offered,) = [each for each in requests.get(f"{service.url}/tools", timeout=5).json() if each["name"] != "python"]
    assert offered["arguments"]["properties"]["text"]["type"] == "string"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("plugins: [{name: count_wrods}]", ["count_wrods", "tools_sandbox.tool"]),
        (
            f"mcp: {{a: {{command: {sys.executable}, args: [{SERVER['args'][0]}, --broken]}}}}",
            ["mcp.a", "does not start"],
        ),
        ("mcp: {a: {command: /no/such/program}}", ["mcp.a", "/no/such/program"]),
        (
            f"mcp: {{a: {{command: {sys.executable}, args: [{CARELESS['args'][0]}, --broken-schema]}}}}",
            ['"broken"', "properties.a.type", "leave the tool out"],
        ),
        (f"mcp: {{a: {{command: {sys.executable}, args: [{SERVER['args'][0]}], tools: [sub]}}}}", ['"sub"', "add"]),
    ],
)
def test_a_tool_that_cannot_be_added_is_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "c.yaml").write_text(text)
    line = refused_start("--config", str(tmp_path / "c.yaml"))
    for part in parts:
        assert part in line


def test_tools_of_an_mcp_server_are_called_checked_and_survive_its_death(start_service: StartService) -> None:
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
        assert client.call("add", {"a": 20, "b": 30}, timeout_s=60).text == "50"  # by a server that has to start first
        names = set(client.call("environment", {}).text.split())
        assert "GIVEN" in names
        assert not names & set(secret)
    family = service.family()
    service.process.terminate()
    service.process.wait(60)
    wait_until(lambda: not any(each.is_running() for each in family[1:]))


def test_what_an_mcp_server_answers_badly_costs_that_call_alone(start_service: StartService) -> None:
    service = start_service({"mcp": {"careless": {**CARELESS, "max_chars": 1000}}})
    with SandboxClient(service.url, retries=0) as client, ThreadPoolExecutor(1) as pool:
        pid = client.call("pid", {}).text
        slow = pool.submit(client.call, "slow", {})
        for name in ("liar", "unknown"):
            wrong = client.call(name, {"a": 1})
            assert (wrong.status, "not the fault" in wrong.text) == ("error", True)
        cut = client.call("large", {"bytes": 2_000_000})
        assert (cut.status, len(cut.text) < 1100, "2000000 characters in all" in cut.text) == ("ok", True, True)
        for name in ("large", "id_last"):
            long = client.call(name, {"bytes": 20_000_000}, timeout_s=60)
            assert (long.status, "too long" in long.text) == ("error", True)
        assert client.call("id_hidden", {"bytes": 20_000_000}, timeout_s=1.0).status == "timeout"
        assert slow.result().text == "slept"
        assert client.call("pid", {}).text == pid  # it was not started again
    assert "answers nobody" in service.stderr()


@given(st.binary(max_size=300).filter(lambda end: b"\n" not in end), st.lists(st.integers(0, 200), max_size=6))
def test_lines_within_the_bound_pass_as_they_are_and_others_do_not(end: bytes, sizes: list[int]) -> None:
    lines = [b"x" * size + b"\n" for size in sizes]
    out = io.BytesIO()
    relay(io.BytesIO(b"".join(lines) + end), out, 100)
    expected = [line for line in lines if len(line) <= 101] + [end] * (len(end) <= 100)
    assert out.getvalue() == b"".join(expected)


@pytest.mark.parametrize("wanted", [7, "seven"])
def test_whoever_asked_for_a_line_that_is_too_long_is_told(wanted: int | str) -> None:
    long = {"content": "y" * 1000, "id": 3, "inner": {"id": 4}, "quoted": ',"id":5}'}
    for message in ({"jsonrpc": "2.0", "id": wanted, "result": long}, {"result": long, "jsonrpc": "2.0", "id": wanted}):
        out = io.BytesIO()
        relay(io.BytesIO(json.dumps(message).encode() + b"\n{}\n"), out, 100)
        told, after = out.getvalue().splitlines()
        assert (json.loads(told)["id"], json.loads(told)["error"]["code"], after) == (wanted, TOO_LONG, b"{}")


def test_a_request_of_the_server_that_is_too_long_answers_nobody() -> None:
    for message in ({"jsonrpc": "2.0", "id": 7, "method": "y" * 1000}, {"method": "y" * 1000, "id": 7}):
        out = io.BytesIO()
        relay(io.BytesIO(json.dumps(message).encode() + b"\n"), out, 100)
        assert not out.getvalue()
