"""Worker processes: whatever a tool does to its process, honest calls are answered right, and nothing is left over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.tools_sandbox.test_service_process import refused_start, wait_until, wait_until_gone
from tools_sandbox.client import SandboxClient

StartService = Callable[..., Any]
ROOT, HERE = Path(__file__).resolve().parents[2], Path(__file__).resolve().parent
NAMES = {"abort": "Abort", "abort_once": "AbortOnce", "hold": "Hold", "sleep": "Sleep", "stuck": "Stuck"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Makes `troublesome_tools` an installed package that offers its tools."""
    folder = tmp_path_factory.mktemp("installed")
    metadata = folder / "troublesome-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: troublesome\nVersion: 1.0\n")
    names = {**NAMES, "raise": "Raise", "slow_start": "SlowStart", "no_tool": "NoTool"}
    lines = "".join(f"{name} = troublesome_tools:{kind}\n" for name, kind in names.items())
    (metadata / "entry_points.txt").write_text(f"[tools_sandbox.tool]\n{lines}")
    return {"PYTHONPATH": f"{folder}:{HERE}:{ROOT}"}


def configured(tmp_path: Path, *names: str, **more: Any) -> dict[str, Any]:
    corpus = tmp_path / "facts.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"fact{n} value{n}"}) + "\n" for n in range(500)))
    plugins = [{"name": name} for name in names]
    return {"plugins": plugins, "search": {"sources": [{"path": str(corpus), "format": "jsonl"}]}, "workers": 2, **more}


def alive(service: Any) -> int:
    return int(requests.get(f"{service.url}/health", timeout=5).json()["workers"]["alive"])


def ask_honestly(client: SandboxClient, numbers: range) -> None:
    for number in numbers:
        answer = client.call("search", {"query": f"fact{number}"}, trajectory_id="honest")
        assert (answer.status, answer.text) == ("ok", f"Page 1: fact{number} value{number}")


def test_a_tool_that_kills_its_process_costs_others_nothing(
    start_service: StartService, environment: dict[str, str], tmp_path: Path
) -> None:
    service = start_service(configured(tmp_path, "abort", "abort_once", "raise"), env=environment)
    with SandboxClient(service.url) as client, ThreadPoolExecutor(2) as pool:
        honest = pool.submit(ask_honestly, client, range(100))
        for name in ("abort", "abort_once", "raise"):
            answer = client.call(name, {})
            assert (answer.status, "not the fault" in answer.text) == ("error", True)
            assert "inner matter" not in answer.text
        honest.result()
        ask_honestly(client, range(100, 120))
        wait_until(lambda: alive(service) == 2)
        restarts = requests.get(f"{service.url}/health", timeout=5).json()["workers"]["restarts"]
        assert restarts == 4  # three tries of the one that may be repeated, one of the other


def test_calls_that_were_beside_a_killer_are_not_taken_for_it(
    start_service: StartService, environment: dict[str, str], tmp_path: Path
) -> None:
    service = start_service(configured(tmp_path, "abort", "sleep"), env=environment)
    with SandboxClient(service.url) as client, ThreadPoolExecutor(9) as pool:
        beside = [pool.submit(client.call, "sleep", {"seconds": 0.8}, trajectory_id=str(n)) for n in range(5)]
        wait_until(lambda: requests.get(f"{service.url}/health", timeout=5).json()["running"] == 5)
        assert client.call("abort", {}).status == "error"
        assert [call.result().text for call in beside] == ["slept 0.8"] * 5


@pytest.mark.parametrize("name", ["hold", "stuck"])
def test_a_tool_that_heeds_no_time_limit_is_ended_with_its_process(
    start_service: StartService, environment: dict[str, str], tmp_path: Path, name: str
) -> None:
    service = start_service(configured(tmp_path, name), env=environment)
    with SandboxClient(service.url) as client, ThreadPoolExecutor(2) as pool:
        before = {each.pid for each in service.workers()}
        honest = pool.submit(ask_honestly, client, range(200))
        began = time.monotonic()
        answer = client.call(name, {}, timeout_s=0.5)
        assert (answer.status, time.monotonic() - began < 20) == ("timeout", True)  # by itself it takes 60 s and more
        honest.result()
        wait_until(lambda: alive(service) == 2 and len(before - {each.pid for each in service.workers()}) == 1)
        ask_honestly(client, range(200, 220))


def test_a_killed_worker_loses_no_call(
    start_service: StartService, environment: dict[str, str], tmp_path: Path
) -> None:
    ran, end = tmp_path / "ran", tmp_path / "end"
    config = configured(tmp_path, workers=2)
    config["plugins"] = [{"name": "sleep", "options": {"ran": str(ran), "until": str(end)}}]
    service = start_service(config, env=environment)
    with SandboxClient(service.url) as client, ThreadPoolExecutor(8) as pool:
        asked = {"seconds": 0.0}
        calls = [pool.submit(client.call, "sleep", asked, trajectory_id=str(n), timeout_s=100) for n in range(8)]
        wait_until(lambda: ran.exists() and len(ran.read_text().split()) == 8)
        service.workers()[0].send_signal(signal.SIGKILL)
        wait_until(lambda: len(ran.read_text().split()) > 8)  # none ends before
        end.touch()
        assert [call.result().text for call in calls] == ["slept 0.0"] * 8
        assert 8 < len(ran.read_text().split()) <= 12  # those of the killed worker, at most four, ran again
        wait_until(lambda: alive(service) == 2)


def test_workers_end_with_a_killed_service_and_leave_no_folder(
    start_service: StartService, environment: dict[str, str], tmp_path: Path
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    service = start_service(configured(tmp_path, "sleep"), env={**environment, "TMPDIR": str(place)})
    assert any("index" in each.name for each in place.iterdir())

    def call() -> None:
        with SandboxClient(service.url, retries=0) as client, pytest.raises(Exception, match="unavailable"):
            client.call("sleep", {"seconds": 60}, timeout_s=60)

    caller = threading.Thread(target=call)
    caller.start()
    wait_until(lambda: requests.get(f"{service.url}/health", timeout=5).json()["running"] == 1)
    family = service.family()
    os.killpg(service.process.pid, signal.SIGKILL)  # as a supervisor does
    wait_until_gone(family)
    wait_until(lambda: not list(place.iterdir()))
    caller.join()


def test_a_service_that_ends_waits_for_no_worker_that_starts(
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
    assert service.process.wait(60) == 0  # the worker would not serve before 120 s are over


def test_what_a_service_killed_at_its_start_leaves_is_removed_by_the_next(
    start_service: StartService, environment: dict[str, str], tmp_path: Path
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    env = {**environment, "TMPDIR": str(place)}
    config = configured(tmp_path)
    (tmp_path / "facts.jsonl").write_text('{"text": "fact"}\n' * 200_000)  # takes seconds to index
    (tmp_path / "c.yaml").write_text(json.dumps({**config, "python": {"preload": []}}))
    command = [sys.executable, "-m", "tools_sandbox", "--config", str(tmp_path / "c.yaml")]
    killed = subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_until(lambda: list(place.glob("*index*/*.building")))
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    (left,) = place.glob("*index*")
    (tmp_path / "facts.jsonl").write_text('{"text": "fact1"}\n')
    first = start_service(config, env=env)
    assert not left.exists()
    (used,) = place.glob("*index*")
    with SandboxClient(start_service(config, env=env).url) as client:  # one beside it takes nothing away
        assert client.call("search", {"query": "fact1"}).text == "Page 1: fact1"
    with SandboxClient(first.url) as client:
        assert client.call("search", {"query": "fact1"}).text == "Page 1: fact1"
    assert used.exists()


def test_a_plugin_that_is_no_tool_is_one_line(tmp_path: Path, environment: dict[str, str], monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    for name, said in (("no_tool", "is no"), ("abort, options: {x: 1}", "TypeError")):
        (tmp_path / "c.yaml").write_text(f"plugins: [{{name: {name}}}]\n")
        assert said in refused_start("--config", str(tmp_path / "c.yaml"))
