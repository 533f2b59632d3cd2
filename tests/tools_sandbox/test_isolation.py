"""The walls that a machine allows are raised and told; a service that needs more than that does not start."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools_sandbox.client import SandboxClient
from tools_sandbox.python_tool import seccomp

KINDS = {
    "root": {},
    "nobody": {"as_nobody": True},
    "no-namespaces": {"without_namespaces": True},
    "nobody-no-namespaces": {"as_nobody": True, "without_namespaces": True},
}


@pytest.fixture(scope="module", params=KINDS)
def walled(request: pytest.FixtureRequest) -> Iterator[tuple[SandboxClient, Any]]:
    from tests.tools_sandbox.conftest import running

    if "nobody" in request.param and os.getuid() != 0:
        pytest.skip("the other kinds already run as an ordinary user")
    level = "process" if "no-namespaces" in request.param else "contained"
    with (
        running({"python": {"isolation": level}}, env={"SECRET": "s3cret"}, **KINDS[request.param]) as service,
        SandboxClient(service.url) as client,
    ):
        yield client, service


def stands(service: Any, mechanism: str) -> bool:
    """What the start has said of a mechanism."""
    (line,) = (line for line in service.stderr().splitlines() if f"python isolation: {mechanism}: " in line)
    return f"{mechanism}: yes" in line


def test_the_start_says_what_each_mechanism_gives_or_lacks(walled: tuple[SandboxClient, Any], request: Any) -> None:
    _, service = walled
    assert "python isolation: level " in service.stderr()
    namespaces = "no-namespaces" not in request.node.callspec.params["walled"]
    for mechanism in ("network namespace", "PID namespace", "mount namespace"):
        assert stands(service, mechanism) == namespaces
    assert stands(service, "system call filter")
    assert stands(service, "resource limits")


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


def test_no_file_of_the_machine_is_in_reach(walled: tuple[SandboxClient, Any]) -> None:
    client, service = walled
    for place in ("/etc/shadow", "/etc/hostname", str(Path(__file__)), f"/proc/{service.process.pid}/environ"):
        assert client.call("python", {"code": f"open({place!r}).read()"}).status == "error"
    for place in ("/etc/x", "/usr/x", "/proc/sys/kernel/hostname", f"{sys.prefix}/x.pth", "/tmp/x"):
        answer = client.call("python", {"code": f"open({place!r}, 'w').write('1')"})
        assert answer.status == "error" or place == "/tmp/x"
        assert not Path(place).exists() or "/proc/" in place


def test_numerical_libraries_work_inside(walled: tuple[SandboxClient, Any]) -> None:
    client, _ = walled
    assert client.call("python", {"code": "import numpy as np; int((np.eye(3) @ np.ones(3)).sum())"}).text == "3"
    pools = "from concurrent.futures import ProcessPoolExecutor as P\nsum(P(2).map(abs, [-1, -2]))"
    if stands(walled[1], "mount namespace"):  # its locks are files in /dev/shm
        assert client.call("python", {"code": pools}).text == "3"


@pytest.mark.parametrize("level", ["contained", "full"])
def test_a_service_that_cannot_reach_its_level_says_so_in_one_line(level: str) -> None:
    from tests.tools_sandbox.conftest import running

    with (
        pytest.raises(AssertionError) as caught,
        running({"python": {"isolation": level}}, as_nobody=os.getuid() == 0, without_namespaces=level == "contained"),
    ):
        pass
    lines = [line for line in str(caught.value).splitlines() if "isolation" in line]
    assert len(lines) == 1
    reached = "process" if level == "contained" else "contained"
    assert f"{level!r} is asked for, this machine reaches {reached!r}" in lines[0]
    assert ("mount namespace: NO" if level == "contained" else "control groups: NO") in lines[0]


@pytest.mark.skipif(not Path("/sys/fs/cgroup/memory").is_dir() or os.getuid() != 0, reason="no groups of ours here")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_control_group_stays_behind(start_service: Any, number: signal.Signals) -> None:
    service = start_service({"python": {"isolation": "full"}})
    with SandboxClient(service.url) as client:
        first = service.zygote().pid
        assert groups_of(first)
        os.kill(first, signal.SIGKILL)  # its successor cleans up behind it
        assert client.call("python", {"code": "1"}).text == "1"
    zygote = service.zygote().pid
    assert groups_of(zygote)
    assert not groups_of(first)
    service.process.send_signal(number)
    service.process.wait(5)
    deadline = time.monotonic() + 5
    while groups_of(zygote):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def groups_of(zygote: int) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/tools_sandbox-{zygote}-*"))


def test_the_filter_is_made_for_both_architectures() -> None:
    for machine in ("x86_64", "aarch64"):
        program = seccomp.program(machine)
        assert len(program) % 8 == 0
        assert 100 < len(program) // 8 < 4096
