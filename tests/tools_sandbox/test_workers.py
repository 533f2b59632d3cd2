"""Worker processes: a tool may crash or hang its worker; other calls get right answers, and nothing is left over."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import httpx
import pytest
import requests

from tests.tools_sandbox.helpers.services import running, wait_until, wait_until_gone
from tools_sandbox.answers import ToolResult
from tools_sandbox.catalog import build_tools
from tools_sandbox.client import SandboxClient, SandboxUnavailable
from tools_sandbox.config import ConfigError, PluginConfig, ToolServiceConfig
from tools_sandbox.tool import Tool, ToolBroken
from tools_sandbox.workers import pool as worker_pool
from tools_sandbox.workers import worker

StartService = Callable[..., Any]
ROOT, HELPERS = Path(__file__).resolve().parents[2], Path(__file__).resolve().parent / "helpers"
PLUGINS = {
    "abort": "Abort",
    "abort_once": "AbortOnce",
    "hold": "Hold",
    "no_tool": "NoTool",
    "raise": "Raise",
    "sleep": "Sleep",
    "sleep_once": "SleepOnce",
    "slow_start": "SlowStart",
    "stuck": "Stuck",
}
"""Classes of `troublesome_tools` by tool name."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which `troublesome_tools` is an installed package that offers its tools."""
    folder = tmp_path_factory.mktemp("installed")
    metadata = folder / "troublesome-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: troublesome\nVersion: 1.0\n")
    lines = "".join(f"{name} = troublesome_tools:{kind}\n" for name, kind in PLUGINS.items())
    (metadata / "entry_points.txt").write_text(f"[tools_sandbox.tool]\n{lines}")
    return {"PYTHONPATH": f"{folder}:{HELPERS}:{ROOT}"}


def configured(folder: Path, *plugins: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a configuration with plug-in tools and a search corpus."""
    corpus = folder / "facts.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"fact{n} value{n}"}) + "\n" for n in range(500)))
    search = {"sources": [{"path": str(corpus), "format": "jsonl"}]}
    return {"plugins": list(plugins), "search": search, "workers": 2, **more}


@dataclass(frozen=True)
class Troubled:
    """A service with troublesome tools, the files of its sleep tool (see `troublesome_tools.Sleep`), and where tools
    that do not end make a file of their name when they begin."""

    service: Any
    ran: Path
    until: Path
    began: Path


@pytest.fixture(scope="module")
def troubled(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troubled]:
    folder = tmp_path_factory.mktemp("troubled")
    ran, until = folder / "ran", folder / "until"
    until.touch()
    plugins: list[dict[str, Any]] = [{"name": name} for name in ("abort", "abort_once", "raise")]
    plugins += [{"name": name, "options": {"began": str(folder / name)}} for name in ("hold", "stuck")]
    plugins += [{"name": name, "options": {"ran": str(ran), "until": str(until)}} for name in ("sleep", "sleep_once")]
    with running(configured(folder, *plugins), env=environment) as service:
        yield Troubled(service, ran, until, folder)


def alive(service: Any) -> int:
    return int(requests.get(f"{service.url}/health", timeout=5).json()["workers"]["alive"])


def search_facts(client: SandboxClient, numbers: range) -> None:
    for number in numbers:
        answer = client.call("search", {"query": f"fact{number}"}, trajectory_id="honest")
        assert (answer.status, answer.text) == ("ok", f"Page 1: fact{number} value{number}")


def restarts(service: Any) -> int:
    return int(requests.get(f"{service.url}/health", timeout=5).json()["workers"]["restarts"])


def test_tool_that_kills_its_worker_fails_only_itself(troubled: Troubled) -> None:
    before = restarts(troubled.service)
    with SandboxClient(troubled.service.url) as client, ThreadPoolExecutor(2) as pool:
        searches = pool.submit(search_facts, client, range(100))
        for name in ("abort", "abort_once", "raise"):
            wait_until(lambda: alive(troubled.service) == 2)  # a search survives the loss of one worker at a time
            answer = client.call(name, {})
            assert (answer.status, "not the fault" in answer.text) == ("error", True)
            assert (answer.failure, "inner matter" in answer.text) == ("lasting", False)
        searches.result()
        search_facts(client, range(100, 120))
    wait_until(lambda: alive(troubled.service) == 2)
    assert restarts(troubled.service) - before == 3  # two tries of the repeatable tool, one of the other


def test_call_next_to_killer_is_repeated(troubled: Troubled) -> None:
    wait_until(lambda: alive(troubled.service) == 2)
    troubled.ran.write_text("")
    troubled.until.unlink()
    with SandboxClient(troubled.service.url) as client, ThreadPoolExecutor(1) as pool:
        other = pool.submit(client.call, "sleep", {"seconds": 0.0}, timeout_s=100)
        wait_until(lambda: len(troubled.ran.read_text().split()) == 1)
        assert client.call("abort", {}).status == "error"  # killed the other call's worker with its second try
        troubled.until.touch()
        assert other.result().text == "slept 0.0"
    assert len(troubled.ran.read_text().split()) == 2


class Disconnected(Tool):
    """A tool whose code raises an error."""

    name, description = "disconnected", "for tests"

    def __init__(self, error: Exception, *, repeatable: bool = True) -> None:
        self.arguments: Any = {}
        self._error, self.repeatable = error, repeatable

    async def run(self, arguments: Any, timeout_s: float) -> ToolResult:
        raise self._error


@pytest.mark.parametrize(
    ("error", "repeatable", "failure"),
    [
        (ConnectionRefusedError("refused"), True, "temporary"),
        (ConnectionRefusedError("refused"), False, "lasting"),
        (TimeoutError(), True, "temporary"),
        (requests.ConnectTimeout("silent"), True, "temporary"),
        (aiohttp.ServerDisconnectedError(), True, "temporary"),
        (httpx.ConnectError("refused"), True, "temporary"),
        (KeyError("a mistake in the tool"), True, "lasting"),
        (ToolBroken("no account", blocked="no account"), True, "blocked"),
    ],
)
def test_error_in_code_of_tool_is_no_result_of_the_call(error: Exception, repeatable: bool, failure: str) -> None:
    result = asyncio.run(worker.run_tool(Disconnected(error, repeatable=repeatable), {}, 1.0))
    assert (result.status, result.failure) == ("error", failure)


@pytest.mark.parametrize("name", ["hold", "stuck"])
def test_tool_that_ignores_time_limit_is_ended_with_worker(troubled: Troubled, name: str) -> None:
    service = troubled.service

    def workers() -> set[int]:
        return {each.pid for each in service.workers()}

    wait_until(lambda: alive(service) == 2)
    with SandboxClient(service.url) as client, ThreadPoolExecutor(2) as pool:
        before = workers()
        searches = pool.submit(search_facts, client, range(200))
        while not (troubled.began / name).exists():  # on a busy machine a call may end before the tool has begun
            start = time.monotonic()
            answer = client.call(name, {}, timeout_s=3.0)
            assert (answer.status, time.monotonic() - start < 20) == ("timeout", True)  # the tool itself takes 60 s
        searches.result()
        wait_until(  # a tool that began just before its call ended has cost the other worker, too
            lambda: alive(service) == 2 and bool(workers() - before),
            state=lambda: (before, workers(), alive(service), service.stderr()),
        )
        search_facts(client, range(200, 220))


def test_deadline_ends_a_call_that_may_not_run_twice_for_good(troubled: Troubled) -> None:
    """Another answer than HTTP 504, after which a caller may repeat the call."""
    troubled.ran.write_text("")
    with SandboxClient(troubled.service.url) as client:
        answer = client.call("sleep_once", {"seconds": 60.0}, timeout_s=60, deadline_s=5.0)
        assert (answer.status, answer.failure) == ("error", "lasting")
        with pytest.raises(SandboxUnavailable):
            client.call("sleep", {"seconds": 60.0}, timeout_s=60, deadline_s=5.0)
    assert len(troubled.ran.read_text().split()) == 2


def test_killed_worker_loses_no_call(troubled: Troubled) -> None:
    service, ran = troubled.service, troubled.ran
    wait_until(lambda: alive(service) == 2)
    ran.write_text("")
    troubled.until.unlink()
    with SandboxClient(service.url) as client, ThreadPoolExecutor(8) as pool:
        arguments = {"seconds": 0.0}
        calls = [pool.submit(client.call, "sleep", arguments, trajectory_id=str(n), timeout_s=100) for n in range(8)]
        wait_until(lambda: len(ran.read_text().split()) == 8)
        service.workers()[0].send_signal(signal.SIGKILL)
        wait_until(lambda: len(ran.read_text().split()) > 8)  # no call has ended before
        troubled.until.touch()
        assert [call.result().text for call in calls] == ["slept 0.0"] * 8
        assert 8 < len(ran.read_text().split()) <= 12  # at most the four calls of the killed worker ran again
    wait_until(lambda: alive(service) == 2)


def test_workers_end_with_killed_service_and_leave_no_folder(
    start_service: StartService, environment: dict[str, str], tmp_path: Path
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    service = start_service(configured(tmp_path, {"name": "sleep"}), env={**environment, "TMPDIR": str(place)})
    assert any("index" in each.name for each in place.iterdir())

    def call() -> None:
        with SandboxClient(service.url, retries=0) as client, pytest.raises(Exception, match="unavailable"):
            client.call("sleep", {"seconds": 60}, timeout_s=60)

    caller = threading.Thread(target=call)
    caller.start()
    wait_until(lambda: requests.get(f"{service.url}/health", timeout=5).json()["running"] == 1)
    family = service.family()
    os.killpg(service.process.pid, signal.SIGKILL)  # like a supervisor of jobs
    wait_until_gone(family)
    wait_until(lambda: not list(place.iterdir()))
    caller.join()


class Unkillable(subprocess.Popen[bytes]):
    """A process that the kernel does not end, for example because it waits for a network file system."""

    started: ClassVar[list[subprocess.Popen[bytes]]] = []
    ended = threading.Event()

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.started.append(self)

    def kill(self) -> None:
        """Do nothing before `ended`."""
        if self.ended.is_set():
            super().kill()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for `ended`, then for the process."""
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return super().wait()


def test_worker_that_kernel_does_not_end_is_replaced_and_delays_no_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, ended, lines = list[Unkillable](), threading.Event(), list[str]()
    # Not `caplog`: libraries that other tests import disable loggers.
    monkeypatch.setattr(worker_pool.log, "warning", lambda line, **_: lines.append(line))
    monkeypatch.setattr(Unkillable, "started", started)
    monkeypatch.setattr(Unkillable, "ended", ended)
    monkeypatch.setattr(subprocess, "Popen", Unkillable)
    for name in ("_CANCEL_GRACE_S", "_END_S", "_KILL_TIMEOUT_S"):
        monkeypatch.setattr(worker_pool, name, 0.2)

    async def run() -> None:
        workers = worker_pool.WorkerPool(ToolServiceConfig(workers=1), [])
        try:
            await workers.start()
            started[0].send_signal(signal.SIGSTOP)
            assert (await workers.run("any", {}, 0.1, repeatable=False)).status == "timeout"
            async with asyncio.timeout(60):
                while not (workers.restarts and workers.alive and "a worker died" in lines):
                    await asyncio.sleep(0.02)
            started[1].send_signal(signal.SIGSTOP)
            async with asyncio.timeout(60):
                await workers.stop()
        finally:
            ended.set()
            for process in started:
                process.kill()

    asyncio.run(run())
    assert [process.wait() for process in started] == [-signal.SIGKILL] * 2


def test_call_that_is_cancelled_before_it_begins_costs_no_worker(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker reads both messages at once, as on a busy machine."""
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])

    async def run() -> int:
        workers = worker_pool.WorkerPool(ToolServiceConfig(workers=1, plugins=(PluginConfig("sleep"),)), [])
        await workers.start()
        try:
            (worker,) = workers._workers  # nothing else shows when the call has ended
            call = asyncio.create_task(workers.run("sleep", {"seconds": 60.0}, 60.0, repeatable=True))
            while not worker.pending:
                await asyncio.sleep(0)
            call.cancel()
            async with asyncio.timeout(60):
                while worker.pending:
                    await asyncio.sleep(0.02)
            assert (await workers.run("sleep", {"seconds": 0.0}, 60.0, repeatable=True)).status == "ok"
            return workers.restarts
        finally:
            await workers.stop()

    assert asyncio.run(run()) == 0


def test_lack_of_workers_is_no_timeout_of_the_call() -> None:
    workers = worker_pool.WorkerPool(ToolServiceConfig(), [])  # not started: it has none
    with pytest.raises(ToolBroken, match="no worker started") as caught:
        asyncio.run(workers.run("any", {}, 0.05, repeatable=False))
    assert caught.value.failure == "temporary"


def test_shutdown_does_not_wait_for_starting_worker(
    start_service: StartService, environment: dict[str, str], tmp_path: Path
) -> None:
    held = tmp_path / "held"
    plugins = [{"name": "slow_start", "options": {"held": str(held)}}]
    service = start_service({"plugins": plugins, "workers": 1}, env=environment)
    (first,) = service.workers()
    held.touch()
    first.kill()
    wait_until(lambda: any(each.pid != first.pid for each in service.workers()))
    service.process.terminate()
    assert service.process.wait(60) == 0  # the worker would take 120 s to serve


def test_next_service_removes_leftovers_of_killed_start(
    start_service: StartService, environment: dict[str, str], tmp_path: Path
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    env = {**environment, "TMPDIR": str(place)}
    config = configured(tmp_path, workers=1)
    (tmp_path / "facts.jsonl").write_text('{"text": "fact"}\n' * 100_000)  # takes seconds to index
    (tmp_path / "c.yaml").write_text(json.dumps({**config, "python": {"preload": []}}))
    command = [sys.executable, "-m", "tools_sandbox", "--config", str(tmp_path / "c.yaml")]
    killed = subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.DEVNULL, start_new_session=True)

    def building() -> bool:
        with suppress(FileNotFoundError):  # a folder was renamed or removed meanwhile
            return any(place.glob("*index*/*.building"))
        return False

    wait_until(building)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    (left,) = place.glob("*index*")
    (tmp_path / "facts.jsonl").write_text('{"text": "fact1"}\n')
    first = start_service(config, env=env)
    assert not left.exists()
    (used,) = place.glob("*index*")
    with SandboxClient(start_service(config, env=env).url) as client:  # a second service removes nothing of the first
        assert client.call("search", {"query": "fact1"}).text == "Page 1: fact1"
    with SandboxClient(first.url) as client:
        assert client.call("search", {"query": "fact1"}).text == "Page 1: fact1"
    assert used.exists()


def test_plugin_that_is_no_tool_is_a_config_error(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in environment["PYTHONPATH"].split(":")[:2]:
        monkeypatch.syspath_prepend(folder)
    with pytest.raises(ConfigError, match="is not a tools_sandbox"):
        build_tools(ToolServiceConfig(plugins=(PluginConfig("no_tool"),)))
    with pytest.raises(ConfigError, match="TypeError"):
        build_tools(ToolServiceConfig(plugins=(PluginConfig("abort", {"x": 1}),)))
