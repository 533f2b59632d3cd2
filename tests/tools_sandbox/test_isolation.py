"""Isolation: the walls that a machine allows are raised and logged; a service that needs more does not start."""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tools_sandbox.helpers.services import python_pool, running, wait_until, wait_until_gone
from tools_sandbox.client import SandboxClient
from tools_sandbox.config import Limits
from tools_sandbox.python_tool import cgroups, seccomp

KINDS = {
    "root": {},
    "nobody": {"as_nobody": True},
    "no-namespaces": {"without_namespaces": True},
    "nobody-no-namespaces": {"as_nobody": True, "without_namespaces": True},
}


@pytest.fixture(scope="module", params=KINDS)
def walled(request: pytest.FixtureRequest) -> Iterator[tuple[SandboxClient, Any]]:
    if "nobody" in request.param and os.getuid() != 0:
        pytest.skip("the other kinds already run as an ordinary user")
    level = "process" if "no-namespaces" in request.param else "contained"
    with (
        tempfile.TemporaryDirectory() as folder,
        running({"python": {"isolation": level}}, env=environment(folder), **KINDS[request.param]) as service,
        SandboxClient(service.url) as client,
    ):
        yield client, service


def environment(folder: str) -> dict[str, str]:
    Path(folder).chmod(0o777)
    return {"SECRET": "s3cret", "TMPDIR": folder}


def stands(service: Any, mechanism: str) -> bool:
    """Return whether the log reports that a mechanism stands."""
    (line,) = (line for line in service.stderr().splitlines() if f"python isolation: {mechanism}: " in line)
    return f"{mechanism}: yes" in line


def test_start_logs_each_mechanism(walled: tuple[SandboxClient, Any], request: Any) -> None:
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


def test_command_line_does_not_reveal_service_folder(walled: tuple[SandboxClient, Any]) -> None:
    client, service = walled
    _, *arguments = service.zygote().cmdline()  # the interpreter may be in a .venv of this clone
    line = " ".join(arguments)
    assert str(Path(__file__).parents[2]) not in line
    assert "memory_mib" not in line
    answer = client.call("python", {"code": "open('/proc/self/cmdline').read()"})
    assert answer.text == "\0".join([*service.zygote().cmdline(), ""]) or "PermissionError" in answer.text


# If it escapes, it ends by itself.
BOMB = """
import os, time
end = time.monotonic() + 60
while time.monotonic() < end:
    if os.fork() == 0: os.setsid()
"""


def test_fork_bomb_ends_with_its_call(walled: tuple[SandboxClient, Any]) -> None:
    client, service = walled
    began = time.monotonic()
    assert client.call("python", {"code": BOMB}, timeout_s=1).status in ("timeout", "error")
    assert time.monotonic() - began < 30  # it ends by itself after 60 s
    wait_until_gone(service.calls())  # a supervisor ends after its answer
    assert client.call("python", {"code": "6 * 7"}, timeout_s=30).text == "42"


def test_interrupted_sandbox_does_not_run_call_twice(walled: tuple[SandboxClient, Any]) -> None:
    """Below Linux 6.12, a call can send SIGINT to its init process, which must not look like a broken sandbox."""
    client, service = walled
    wait_until(lambda: not service.calls())  # a supervisor ends after its answer
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, "python", {"code": "import time; time.sleep(1); print('once')"})
        wait_until(lambda: len(service.calls()) >= 3)
        supervisor, init, *_ = service.calls()
        for process in (supervisor, init):
            process.send_signal(signal.SIGINT)
        assert call.result().text == "once"
    assert "trying once more" not in service.stderr()


def test_call_without_pid_namespace_can_signal_no_group(walled: tuple[SandboxClient, Any]) -> None:
    client, service = walled
    code = """
import os
for group in (-1, -os.getpgid(0), -os.getppid()):
    try: os.kill(group, 0); print('sent')
    except OSError as error: print(error.errno)
"""
    answer = client.call("python", {"code": code})
    assert stands(service, "PID namespace") or answer.text == "1\n1\n1"
    assert client.call("python", {"code": "import os; os.kill(0, 9)"}).status == "error"  # its own group
    lacks = "python isolation: level process: a call can see names, sizes and times of files"
    assert (lacks in service.stderr()) != stands(service, "PID namespace")


def test_leftover_processes_end_before_answer(walled: tuple[SandboxClient, Any]) -> None:
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


def test_working_directory_is_private_and_removed(walled: tuple[SandboxClient, Any]) -> None:
    client, _ = walled
    code = "import os\nos.makedirs('a/b'); open('a/b/mark-8861', 'w').close(); os.chmod('a', 0); os.getcwd()"
    folder = client.call("python", {"code": code}).text
    assert folder.startswith("/tmp")
    assert folder == "/tmp" or not Path(folder).exists()
    assert client.call("python", {"code": "import os; os.listdir()"}).text == "[]"


def test_files_of_machine_are_unreachable(walled: tuple[SandboxClient, Any]) -> None:
    client, service = walled
    for place in ("/etc/shadow", "/etc/hostname", str(Path(__file__)), f"/proc/{service.process.pid}/environ"):
        assert client.call("python", {"code": f"open({place!r}).read()"}).status == "error"
    for place in ("/etc/x", "/usr/x", "/proc/sys/kernel/hostname", f"{sys.prefix}/x.pth", "/tmp/x"):
        answer = client.call("python", {"code": f"open({place!r}, 'w').write('1')"})
        assert answer.status == "error" or place == "/tmp/x"
        assert not Path(place).exists() or "/proc/" in place


def test_modes_and_times_of_machine_stay(walled: tuple[SandboxClient, Any], tmp_path: Path) -> None:
    """Landlock does not cover them, so that at `process` only the filter does."""
    client, service = walled
    file = tmp_path / "file"
    file.touch(0o600)
    os.utime(file, (1, 1))
    user = service.zygote().uids().real
    for path in (tmp_path, file):
        os.chown(path, user, user)
    code = f"""
import os
for path in ({str(file)!r}, {str(tmp_path)!r}, os.path.dirname(os.getcwd())):
    for change in (lambda: os.chmod(path, 0), lambda: os.utime(path), lambda: os.chown(path, -1, os.getgid())):
        try: change()
        except OSError: pass
print('tried')
"""
    assert client.call("python", {"code": code}).text == "tried"
    left = file.stat()
    assert (left.st_mode & 0o777, left.st_mtime, left.st_uid) == (0o600, 1, user)
    assert client.call("python", {"code": "6 * 7"}).text == "42"


def test_numerical_libraries_work_inside(walled: tuple[SandboxClient, Any]) -> None:
    client, _ = walled
    assert client.call("python", {"code": "import numpy as np; int((np.eye(3) @ np.ones(3)).sum())"}).text == "3"
    pools = "from concurrent.futures import ProcessPoolExecutor as P\nsum(P(2).map(abs, [-1, -2]))"
    if stands(walled[1], "mount namespace"):  # multiprocessing keeps its locks as files in /dev/shm
        assert client.call("python", {"code": pools}).text == "3"


def test_failure_at_interpreter_exit_is_not_failure_of_code(walled: tuple[SandboxClient, Any]) -> None:
    client, _ = walled
    # A process pool sometimes closes a pipe twice.
    code = "import os, threading\nthreading._register_atexit(lambda: os.close(99))\n6 * 7"
    answer = client.call("python", {"code": code})
    assert (answer.status, answer.text) == ("ok", "42")


@pytest.mark.parametrize("level", ["contained", "full"])
def test_unreachable_level_is_reported_in_one_line(level: str) -> None:
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
def test_no_control_group_outlives_service(start_service: Any) -> None:
    service = start_service({"python": {"isolation": "full"}})
    with SandboxClient(service.url) as client:
        first = service.zygote().pid
        assert groups_of(first)
        os.kill(first, signal.SIGKILL)  # its successor removes its groups
        assert client.call("python", {"code": "1"}).text == "1"
    zygote = service.zygote().pid
    assert groups_of(zygote)
    assert not groups_of(first)
    service.process.kill()
    service.process.wait(60)
    wait_until(lambda: not groups_of(zygote))


@pytest.mark.skipif(os.getuid() != 0, reason="no groups of ours here")
def test_existing_group_gets_limits_before_call(tmp_path: Path) -> None:
    """A supervisor may be killed after creating the group and before setting its limits."""
    groups, why_not = cgroups.find()
    if groups is None:
        pytest.skip(why_not)
    try:
        for folder in groups.folders.values():
            os.mkdir("7", dir_fd=folder)
        groups.open_slot(7, 512, 40)
        (found,) = (
            Path(f"/proc/self/fd/{folder}/7/pids.max") for held, folder in groups.folders.items() if "pids" in held
        )
        assert 40 <= int(found.read_text()) < 50
        with pytest.raises(OSError, match="Invalid argument"):
            groups.open_slot(7, 512, 5_000_000)
    finally:
        groups.remove()


@pytest.mark.skipif(os.getuid() != 0, reason="no groups of ours here")
def test_new_group_is_not_taken_for_one_of_a_killed_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services start at once: others look for leftovers before the first one has locked its group."""
    alone, why_not = cgroups.find()
    if alone is None:
        pytest.skip(why_not)
    alone.remove()
    set_up, first = cgroups._set_up, threading.current_thread()
    others, found = list[threading.Thread](), list[cgroups.Groups | None]()

    def interrupted(version: int, held: str, folder: int) -> None:
        if threading.current_thread() is first:
            others.append(threading.Thread(target=lambda: found.append(cgroups.find()[0])))
            others[-1].start()
            others[-1].join(0.05)
        set_up(version, held, folder)

    monkeypatch.setattr(cgroups, "_set_up", interrupted)
    groups, _ = cgroups.find()
    for other in others:
        other.join()
    assert groups is not None
    try:
        assert groups.controllers == alone.controllers
        groups.open_slot(0, 512, 40)
    finally:
        for each in (groups, *found):
            if each is not None:
                each.remove()


@pytest.mark.skipif(os.getuid() != 0, reason="no groups of ours here")
def test_group_that_cannot_be_set_up_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, why_not = cgroups.find()
    if groups is None:
        pytest.skip(why_not)
    groups.remove()

    def no_locks(*_: object) -> None:  # a double: control groups offer locks here
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    groups, why_not = cgroups.find()
    assert groups is None and "No locks available" in why_not
    parents = {*cgroups._first_version().values(), *cgroups._second_version().values()}
    assert not [group for parent in parents for group in parent.glob(f"tools_sandbox-{os.getpid()}-*")]


@pytest.mark.parametrize("smallest", [True, False])
def test_extreme_limits_let_a_call_run(smallest: bool) -> None:
    size = 1 << 24
    small = Limits(memory_mib=16, file_mib=1, disk_mib=1, processes=1, open_files=16, cpu_s=1, output_mib=1)
    large = Limits(memory_mib=size, file_mib=size, disk_mib=size, processes=1 << 20, open_files=1 << 20)
    with python_pool(small if smallest else large) as run:
        assert run("open('x', 'w').write('a'); 1 + 1").text == "2"


DEEP = """
import os
home = os.getcwd()
for name, depth in (('d', 1100), ('n' * 200, 60)):
    os.chdir(home)
    for _ in range(depth):
        os.mkdir(name); os.chdir(name)
    open('file', 'w').close(); os.symlink('/etc', 'link'); os.mkdir('locked', 0)
os.chmod(home, 0)
print('made')
"""


def test_deep_and_locked_folders_do_not_outlive_call(walled: tuple[SandboxClient, Any]) -> None:
    client, service = walled
    (root,) = Path(psutil.Process(service.process.pid).environ()["TMPDIR"]).glob("tools_sandbox-*")
    assert client.call("python", {"code": DEEP}, timeout_s=20).text == "made"
    assert client.call("python", {"code": "6 * 7"}).text == "42"
    assert not list(root.iterdir())
    assert Path("/etc/passwd").exists()
    assert "supervisor failed" not in service.stderr()


def groups_of(zygote: int) -> list[str]:
    """Return the control groups of a zygote. Unlike glob, os.walk continues if a folder vanishes meanwhile."""
    folders = (name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names)
    return [name for name in folders if name.startswith(f"tools_sandbox-{zygote}-")]


def test_filter_is_assembled_for_both_architectures() -> None:
    for machine in ("x86_64", "aarch64"):
        for among_others in (False, True):
            program = seccomp.program(machine, among_others=among_others)
            assert len(program) % 8 == 0
            assert 100 < len(program) // 8 < 4096
