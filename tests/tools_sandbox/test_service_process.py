"""Start and end of the service: failed starts report one line, and an ended service leaves nothing."""

from __future__ import annotations

import errno
import mmap
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.tools_sandbox.helpers.services import (
    read_walls,
    refused_start,
    running_calls,
    wait_until,
    wait_until_gone,
)
from tools_sandbox.__main__ import _CannotStartError, _listen
from tools_sandbox.client import SandboxClient, SandboxUnavailable
from tools_sandbox.config import CacheConfig, ConfigError, load_config
from tools_sandbox.service.cache import AnswerCache
from tools_sandbox.utils.temporary import TemporaryFolder

StartService = Callable[..., Any]
SLEEPER = {"code": "import time; time.sleep(60)"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("limit:\n  time_s: 3\n", ["unknown key 'limit'", "'limits'"]),
        ("search:\n  sources:\n    - {path: missing.jsonl, format: jsonl}\n", ["missing.jsonl", "No such file"]),
        ("python:\n  preload: [no_such_module]\n", ["no_such_module"]),
    ],
)
def test_bad_configuration_is_reported_in_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "c.yaml").write_text(text)
    line = refused_start("--config", str(tmp_path / "c.yaml"))
    for part in parts:
        assert part in line


def test_other_start_failures_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLS_SANDBOX_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"{port}: Address already in use" in refused_start("--port", str(port))
    for host, port, reason in (("0.0.0.0", 0, "TOOLS_SANDBOX_TOKEN"), ("127.0.0.1", 99999, "99999")):
        with pytest.raises(_CannotStartError, match=reason):
            _listen(host, port, token=None)
    with pytest.raises(ConfigError, match="No such file"):
        load_config(Path("/no/such/file.yaml"))
    with pytest.raises(ConfigError, match="sqlite_path"):
        AnswerCache(CacheConfig(sqlite_path=Path("/no/such/folder/c.db")))


def test_signal_ends_service_cleanly_with_calls_in_flight(start_service: StartService) -> None:
    service = start_service({"drain_s": 0.2})
    caught: list[Exception] = []

    def call() -> None:
        try:
            SandboxClient(service.url, retries=0).call("python", SLEEPER, timeout_s=60)
        except SandboxUnavailable as error:
            caught.append(error)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    wait_until(lambda: running_calls(service) == 4 and len(service.at_work()) >= 6)
    family = service.family()  # service, zygote, at least one process per call
    service.process.send_signal(signal.SIGINT)  # SIGTERM: see test_service_http.py
    assert service.process.wait(40) == 0
    wait_until_gone(family[1:])
    for caller in callers:
        caller.join(40)
    assert len(caught) == 4
    assert "Traceback" not in service.stderr()


def sleepers() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if "8765.5" in (p.info["cmdline"] or [])]


@pytest.mark.parametrize("namespaces", [True, False])
def test_no_process_survives_killed_service(start_service: StartService, namespaces: bool) -> None:
    service = start_service({"python": {"isolation": "process"}}, without_namespaces=not namespaces)
    code = "import subprocess, time\nsubprocess.Popen(['sleep', '8765.5'], start_new_session=True)\ntime.sleep(60)"

    def call() -> None:
        with SandboxClient(service.url, retries=0) as client, suppress(SandboxUnavailable):
            client.call("python", {"code": code})

    caller = threading.Thread(target=call)
    caller.start()
    wait_until(lambda: bool(sleepers()))
    family = service.family()
    service.process.kill()
    wait_until_gone(family)
    assert not sleepers()
    caller.join()


def test_processes_created_ahead_have_walls_and_serve_once(start_service: StartService) -> None:
    service = start_service({"python": {"ahead": 3}})
    with SandboxClient(service.url) as client:
        assert client.call("python", {"code": "1"}).text == "1"
        for name in "abcd":
            wait_until(lambda: len(service.waiting()) == 3)
            before = {each.pid for each in service.waiting()}
            answer = client.call("python", {"code": f"import os\nopen('{name}', 'w').close(); os.listdir()"})
            assert answer.text == f"['{name}']"
            assert len(before - {each.pid for each in service.waiting()}) == 1
        # If a waiting process dies, the next call is still answered.
        for number, _ in enumerate(("supervisor", "init", "worker")):
            wait_until(lambda: [len(each.children(recursive=True)) for each in service.waiting()] == [2] * 3)
            trees = [[each, *each.children(recursive=True)] for each in service.waiting()]
            for tree in trees:
                tree[number].kill()
            # Init ends after it has reported the end of its worker.
            wait_until_gone([tree[min(number, 1)] for tree in trees])
            assert [client.call("python", {"code": "6 * 7"}).text for _ in range(5)] == ["42"] * 5
        wait_until(lambda: [len(each.children(recursive=True)) for each in service.waiting()] == [2] * 3)
        for supervisor in service.waiting():
            worker = supervisor.children(recursive=True)[-1]
            wait_until(lambda worker=worker: read_walls(worker) == ("2", 0, "1"))
    family = service.family()
    assert len(family) >= 11
    service.process.terminate()
    assert service.process.wait(40) == 0
    wait_until_gone(family[1:])


def test_no_process_is_created_ahead_without_isolation(start_service: StartService) -> None:
    service = start_service({"python": {"isolation": "process"}}, without_namespaces=True)
    with SandboxClient(service.url) as client:
        assert [client.call("python", {"code": "6 * 7"}).text for _ in range(3)] == ["42"] * 3
        wait_until(lambda: not service.calls())  # a supervisor ends after its answer
        time.sleep(0.3)  # a process created ahead would exist by now
    assert not service.waiting()
    assert not service.calls()


def test_next_service_removes_leftovers_of_killed_one(start_service: StartService, tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    tmp_path.chmod(0o755)
    service = start_service(env=env)
    family = service.family()
    for each in family[:2]:  # service and zygote: neither can react to the end of another process
        each.suspend()
    for each in reversed(family):
        with suppress(psutil.NoSuchProcess):  # it has ended together with another
            each.kill()
    wait_until_gone(family)
    (left,) = tmp_path.glob("tools_sandbox-python-*")
    start_service(env=env)
    assert not left.exists()
    assert len(list(tmp_path.glob("tools_sandbox-python-*"))) == 1


def test_next_folder_removes_one_that_was_not_locked_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, young = tmp_path / ".some-old", tmp_path / ".some-young"
    old.mkdir()
    young.mkdir()
    os.utime(old, (0, 0))
    made = TemporaryFolder("some-")
    assert set(tmp_path.iterdir()) == {made.path, young}
    made.remove()

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(OSError, match="No locks"):
        TemporaryFolder("some-")
    assert list(tmp_path.iterdir()) == [young]


def test_calls_wait_for_zygote_restart(start_service: StartService, tmp_path: Path) -> None:
    folder, away = tmp_path / "here", tmp_path / "away"
    folder.mkdir()
    service = start_service(env={"TMPDIR": str(folder)})
    with SandboxClient(service.url) as client, ThreadPoolExecutor(1) as pool:
        zygote = service.zygote()
        folder.rename(away)
        zygote.kill()
        psutil.wait_procs([zygote], timeout=3)
        answer = pool.submit(client.call, "python", {"code": "2"})
        wait_until(lambda: "cannot be started" in service.stderr())
        assert requests.get(f"{service.url}/health", timeout=5).json()["python"]["alive"] is False
        away.rename(folder)
        assert answer.result(240).text == "2"
    assert requests.get(f"{service.url}/health", timeout=5).json()["python"] == {"alive": True, "restarts": 1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_service_prints_one_line_and_leaves_no_folder(
    start_service: StartService, tmp_path: Path, number: signal.Signals
) -> None:
    service = start_service(
        {"python": {"isolation": "process"}}, without_namespaces=True, env={"TMPDIR": str(tmp_path)}
    )
    with SandboxClient(service.url) as client:
        assert client.call("python", {"code": "1"}).text == "1"
    assert len(list(tmp_path.iterdir())) == 1
    service.process.send_signal(number)
    service.process.wait(60)
    assert service.process.stdout.read() == ""
    wait_until(lambda: not list(tmp_path.iterdir()))


def test_preloaded_modules_are_in_huge_pages_if_kernel_has_them(start_service: StartService) -> None:
    """Forks of calls then copy few entries of page tables."""
    with mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as probe:
        probe.write(b"1" * len(probe))
        try:
            probe.madvise(25)  # MADV_COLLAPSE
            expected = True
        except OSError:
            expected = False
    service = start_service({"python": {"preload": ["numpy"]}})
    with SandboxClient(service.url) as client:
        client.call("python", {"code": "1"})  # served after the change
    rollup = Path(f"/proc/{service.zygote().pid}/smaps_rollup").read_text()
    sizes = re.findall(r"^AnonHugePages: +(\d+) kB", rollup, re.MULTILINE)
    assert [int(size) > 0 for size in sizes] == [expected]
