"""The life of the service: it starts or says why not, it ends cleanly, and nothing of it stays behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
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
        [sys.executable, "-m", "tools_sandbox", *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == 2
    assert result.stdout == ""
    said = [line for line in result.stderr.splitlines() if "search is not offered" not in line]
    assert len(said) == 1, result.stderr
    return said[0]


def wait_until(condition: Callable[[], bool]) -> None:
    """Other work may slow this machine down, so nothing here counts on a fixed time to begin."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running_calls(service: Any) -> int:
    return int(requests.get(f"{service.url}/health", timeout=5).json()["running"])


def wait_until_gone(family: list[psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(family, timeout=within_s)
    assert not alive


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
    wait_until(lambda: running_calls(service) == 4 and len(service.family()) >= 6)
    family = service.family()  # service, zygote, at least one process a call
    service.process.send_signal(number)
    assert service.process.wait(3) == 0
    wait_until_gone(family[1:], 0.5)
    for caller in callers:
        caller.join(5)
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
    wait_until_gone(family, 3)
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
    service.process.wait(3)
    assert service.process.stdout.read() == ""
    wait_until(lambda: not list(tmp_path.iterdir()))
