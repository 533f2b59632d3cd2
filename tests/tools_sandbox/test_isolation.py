"""What code can reach: the promises that hold under every kind of isolation, and those that a wall adds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools_sandbox.client import SandboxClient

KINDS = ["best", "process", "nobody-best", "nobody-process"]


@pytest.fixture(scope="module", params=KINDS)
def walled(request: pytest.FixtureRequest) -> Iterator[tuple[SandboxClient, Any]]:
    from tests.tools_sandbox.conftest import running

    as_nobody = request.param.startswith("nobody")
    if as_nobody and os.getuid() != 0:
        pytest.skip("the other kinds already run as an ordinary user")
    mode = "process" if request.param.endswith("process") else "auto"
    with (
        running({"python": {"isolation": mode}}, as_nobody=as_nobody, env={"SECRET": "s3cret"}) as service,
        SandboxClient(service.url) as client,
    ):
        yield client, service


def in_force(service: Any) -> str:
    return str(service.stderr().split("in force:")[1].split("lost:")[0])


def test_the_start_says_what_is_in_force_and_what_is_lost(walled: tuple[SandboxClient, Any]) -> None:
    assert "resource limits, own session" in in_force(walled[1])
    assert "lost:" in walled[1].stderr()


def test_environment_and_descriptors_are_not_inherited(walled: tuple[SandboxClient, Any]) -> None:
    client, _ = walled
    code = """
import os
def is_open(fd):
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False
print(dict(os.environ), [fd for fd in range(4096) if is_open(fd)])
print(os.getpid() == os.getsid(0) == os.getpgid(0), os.listdir('.'))
try:
    print('SECRET' in open('/proc/self/environ').read())
except OSError:
    print(False)
"""
    answer = client.call("python", {"code": code})
    assert answer.text == "{} [0, 1, 2]\nTrue []\nFalse"


def test_processes_left_behind_are_gone_when_the_answer_comes(walled: tuple[SandboxClient, Any]) -> None:
    client, _ = walled
    code = """
import os, subprocess
subprocess.Popen(['sleep', '7654.5'])
subprocess.Popen(['sleep', '7654.5'], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:  # orphaned on purpose
        os.execvp('sleep', ['sleep', '7654.5'])
    os._exit(0)
print('left')
"""
    assert client.call("python", {"code": code}).text == "left"
    assert client.call("python", {"code": code + "import time; time.sleep(60)"}, timeout_s=0.5).status == "timeout"
    assert not [p for p in psutil.process_iter(["cmdline"]) if "7654.5" in (p.info["cmdline"] or [])]


def test_the_working_directory_is_private_and_removed(walled: tuple[SandboxClient, Any]) -> None:
    client, _ = walled
    code = "import os\nos.makedirs('a/b'); open('a/b/mark-8861', 'w').close(); os.chmod('a', 0); os.getcwd()"
    folder = client.call("python", {"code": code}).text
    assert folder.startswith("/tmp")
    time.sleep(0.05)
    assert folder == "/tmp" or not Path(folder).exists()
    assert client.call("python", {"code": "import os; os.listdir()"}).text == "[]"


def test_walls_that_are_in_force_hold(walled: tuple[SandboxClient, Any]) -> None:
    client, service = walled
    held = in_force(service)
    if "network" in held:
        port = service.url.rsplit(":", 1)[1]
        dial = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        assert "unreachable" in client.call("python", {"code": dial}).text
    if "process tree" in held:
        # Its own init and itself.
        assert client.call("python", {"code": "import os; os.getpid(), os.getppid()"}).text == "(2, 1)"
        assert client.call("python", {"code": f"import os; os.kill({service.process.pid}, 0)"}).status == "error"
    if "file system" in held:
        for place in ("/etc/x", "/usr/x", "/proc/sys/kernel/hostname"):
            assert client.call("python", {"code": f"open({place!r}, 'w')"}).status == "error"
        ours = Path.cwd() / "x"
        client.call("python", {"code": f"open({str(ours)!r}, 'w')"})
        assert not ours.exists()  # below /tmp the call may think it did, in its private one
        assert client.call("python", {"code": "open('/tmp/x', 'w').write('1')"}).status == "ok"
    if "user id" in held:
        assert client.call("python", {"code": "import os; os.getuid()"}).text not in ("0", str(os.getuid()))
        assert client.call("python", {"code": "import os; os.setuid(0)"}).status == "error"


def test_numerical_libraries_work_inside(walled: tuple[SandboxClient, Any]) -> None:
    client, _ = walled
    assert client.call("python", {"code": "import numpy as np; int((np.eye(3) @ np.ones(3)).sum())"}).text == "3"
