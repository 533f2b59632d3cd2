"""The life of the service: it starts or says why not, it ends cleanly, and nothing of it stays behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
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

from tools_sandbox.client import SandboxClient, SandboxDenied, SandboxUnavailable

StartService = Callable[..., Any]
SLEEPER = {"code": "import time; time.sleep(60)"}


def refused_start(*arguments: str) -> str:
    """The one line that a start which cannot work leaves on stderr."""
    result = subprocess.run(
        [sys.executable, "-m", "tools_sandbox", *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 2
    assert result.stdout == ""
    said = [line for line in result.stderr.splitlines() if "search is not offered" not in line]
    assert len(said) == 1, result.stderr
    return said[0]


def wait_until(condition: Callable[[], bool]) -> None:
    """Other work may slow this machine down, so nothing here counts on a fixed time to begin."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running_calls(service: Any) -> int:
    return int(requests.get(f"{service.url}/health", timeout=5).json()["running"])


def wait_until_gone(family: list[psutil.Process]) -> None:
    """Or dead, and to be reaped by init, which takes its time. Code of calls sleeps longer than is waited here."""
    deadline = time.monotonic() + 20
    while alive := [each for each in family if lives(each)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("limit:\n  time_s: 3\n", ["unknown key 'limit'", "'limits'"]),
        ("search:\n  sources:\n    - {path: missing.jsonl, format: jsonl}\n", ["missing.jsonl", "No such file"]),
        ("python:\n  preload: [no_such_module]\n", ["no_such_module"]),
        ("cache:\n  sqlite_path: no/such/folder/c.db\n", ["sqlite_path"]),
    ],
)
def test_a_bad_configuration_is_one_clear_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "c.yaml").write_text(text)
    line = refused_start("--config", str(tmp_path / "c.yaml"))
    for part in parts:
        assert part in line


def test_other_reasons_not_to_start_are_one_clear_line() -> None:
    assert "No such file" in refused_start("--config", "/no/such/file.yaml")
    assert "TOOLS_SANDBOX_TOKEN" in refused_start("--host", "0.0.0.0")
    assert "99999" in refused_start("--port", "99999")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused_start("--port", str(port))
    assert str(port) in line
    assert "in use" in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_cleanly_also_with_calls_in_flight(
    start_service: StartService, number: signal.Signals
) -> None:
    service = start_service({"drain_s": 0.5})
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
    family = service.family()  # service, zygote, at least one process a call
    service.process.send_signal(number)
    assert service.process.wait(40) == 0
    wait_until_gone(family[1:])
    for caller in callers:
        caller.join(40)
    assert len(caught) == 4
    assert "Traceback" not in service.stderr()


def sleepers() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if "8765.5" in (p.info["cmdline"] or [])]


@pytest.mark.parametrize("namespaces", [True, False])
def test_nothing_survives_a_killed_service(start_service: StartService, namespaces: bool) -> None:
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


def test_a_killed_zygote_is_replaced(start_service: StartService) -> None:
    service = start_service()
    with SandboxClient(service.url) as client:
        assert client.call("python", {"code": "1"}).text == "1"
        zygote = service.family()[1]
        zygote.kill()
        psutil.wait_procs([zygote], timeout=3)
        assert [client.call("python", {"code": "2"}).text for _ in range(3)] == ["2"] * 3


def walls_of(process: psutil.Process) -> tuple[str, int, str]:
    """Mode of its system call filter, its capabilities, and whether it may gain any."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return status["Seccomp"], int(status["CapEff"], 16), status["NoNewPrivs"]


def test_calls_wait_behind_their_walls_for_their_code_and_are_used_once(start_service: StartService) -> None:
    service = start_service({"python": {"ahead": 3}})
    with SandboxClient(service.url) as client:
        assert client.call("python", {"code": "1"}).text == "1"
        for name in "abcd":
            wait_until(lambda: len(service.waiting()) == 3)
            before = {each.pid for each in service.waiting()}
            answer = client.call("python", {"code": f"import os\nopen('{name}', 'w').close(); os.listdir()"})
            assert answer.text == f"['{name}']"
            assert len(before - {each.pid for each in service.waiting()}) == 1
        # Whatever becomes of one that waits, the next call is answered.
        for number, _ in enumerate(("supervisor", "init", "worker")):
            wait_until(lambda: [len(each.children(recursive=True)) for each in service.waiting()] == [2] * 3)
            victims = [[each, *each.children(recursive=True)][number] for each in service.waiting()]
            for victim in victims:
                victim.kill()
            psutil.wait_procs(victims, timeout=2)
            assert [client.call("python", {"code": "6 * 7"}).text for _ in range(5)] == ["42"] * 5
        wait_until(lambda: [len(each.children(recursive=True)) for each in service.waiting()] == [2] * 3)
        for supervisor in service.waiting():
            worker = supervisor.children(recursive=True)[-1]
            wait_until(lambda worker=worker: walls_of(worker) == ("2", 0, "1"))
    family = service.family()
    assert len(family) >= 11
    service.process.terminate()
    assert service.process.wait(40) == 0
    wait_until_gone(family[1:])


def test_no_call_waits_where_the_kernel_does_not_hide_it(start_service: StartService) -> None:
    service = start_service({"python": {"isolation": "process"}}, without_namespaces=True)
    with SandboxClient(service.url) as client:
        assert [client.call("python", {"code": "6 * 7"}).text for _ in range(3)] == ["42"] * 3
        wait_until(lambda: not service.calls())  # the supervisor itself ends behind its answer
        time.sleep(0.3)  # one that is to wait would be there by now
    assert not service.waiting()
    assert not service.calls()


def test_what_a_service_and_a_zygote_that_were_killed_leave_is_removed_by_the_next(
    start_service: StartService, tmp_path: Path
) -> None:
    env = {"TMPDIR": str(tmp_path)}
    tmp_path.chmod(0o755)
    service = start_service(env=env)
    family = service.family()
    for each in family[:2]:  # service and zygote: neither notices the end of another, nor starts anything in its place
        each.suspend()
    for each in reversed(family):
        with suppress(psutil.NoSuchProcess):  # it has ended with the one before
            each.kill()
    wait_until_gone(family)
    (left,) = tmp_path.glob("tools_sandbox-python-*")
    start_service(env=env)
    assert not left.exists()
    assert len(list(tmp_path.glob("tools_sandbox-python-*"))) == 1


def test_calls_wait_for_a_zygote_that_cannot_be_started_for_a_while(
    start_service: StartService, tmp_path: Path
) -> None:
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


def test_a_token_guards_calls_but_not_health(start_service: StartService) -> None:
    service = start_service(env={"TOOLS_SANDBOX_TOKEN": "open sesame"})
    with SandboxClient(service.url) as stranger, pytest.raises(SandboxDenied, match="401"):
        stranger.call("python", {"code": "1"})
    with SandboxClient(service.url, token="open sesame") as friend:
        assert friend.call("python", {"code": "1"}).text == "1"
        environment = friend.call("python", {"code": "open('/proc/1/environ').read()"})
        assert "sesame" not in environment.text
    assert requests.get(f"{service.url}/health", timeout=5).status_code == 200
    assert requests.get(f"{service.url}/tools", timeout=5).status_code == 401


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_one_ready_line_and_no_folder_left(start_service: StartService, tmp_path: Path, number: signal.Signals) -> None:
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
