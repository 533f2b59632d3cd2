"""Running services for the tests, each a separate process on a free port, and conditions to wait for."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tools_sandbox.config import Limits, PythonConfig
from tools_sandbox.python_tool.call_supervisor import CALL_NAME
from tools_sandbox.python_tool.pool import PythonPool
from tools_sandbox.python_tool.protocol import Outcome

# Become an ordinary user who can read this Python, even if it is in a closed home directory.
_AS_NOBODY = """
import os, stat, sys
from pathlib import Path
from tools_sandbox.python_tool import files; from tools_sandbox.utils import linux
linux.unshare(linux.CLONE_NEWNS)
linux.mount("", "/", linux.MS_REC | linux.MS_PRIVATE)
needed = [*files.python_paths(), Path.cwd()]
homes = {next((up for up in reversed(path.parents) if not up.stat().st_mode & stat.S_IXOTH), None) for path in needed}
for home in homes - {None}:
    kept = [(path, os.open(path, os.O_PATH)) for path in needed if path.is_relative_to(home)]
    linux.mount("tmpfs", str(home), linux.MS_NOSUID | linux.MS_NODEV, "mode=0755")
    for path, descriptor in kept:
        path.mkdir(parents=True)
        linux.bind(f"/proc/self/fd/{descriptor}", str(path))
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
"""
# Imitate a cluster machine without namespaces: a user namespace that allows no further ones, and no capabilities.
WITHOUT_NAMESPACES = """
import os
from pathlib import Path
from tools_sandbox.utils import linux
uid, gid = os.getuid(), os.getgid()
linux.make_dumpable(True)
linux.unshare(linux.CLONE_NEWUSER)
for name, content in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
    Path(f"/proc/self/{name}").write_text(content)
Path("/proc/sys/user/max_user_namespaces").write_text("0")
linux.forbid_new_privileges()
linux.drop_capabilities()
"""
_WITH_OPEN_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({}, {}))\n"
_START = "import os, sys; os.execv(sys.executable, [sys.executable, '-m', 'tools_sandbox', *sys.argv[1:]])"


CREATED_AHEAD = PythonConfig().ahead
"""Default number of processes that wait for their code."""


class Service:
    """A running service: its `url`, its `process`, and its log so far (`stderr()`)."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process, self.url, self._log = process, url, log

    def stderr(self) -> str:
        return self._log.read_text()

    def zygote(self) -> psutil.Process:
        """Return the process that python calls are forked from."""
        (zygote,) = self._children("python_tool.zygote")
        return zygote

    def calls(self) -> list[psutil.Process]:
        """Return the processes of calls, without those that still wait for one."""
        supervisors = [each for each in self.zygote().children() if _name(each) == CALL_NAME]
        return [each for supervisor in supervisors for each in (supervisor, *_below(supervisor))]

    def waiting(self) -> list[psutil.Process]:
        """Return the supervisors that wait for a call."""
        return [each for each in self.zygote().children() if _name(each) not in (CALL_NAME, "")]

    def idle(self) -> bool:
        """Return whether no call runs, and no more processes than configured wait for one."""
        return not self.calls() and len(self.waiting()) <= CREATED_AHEAD

    def at_work(self) -> list[psutil.Process]:
        """Return the service and all its descendants, without those that wait for a call."""
        family = self.family()  # first: a process that begins to wait in between would count as at work
        idle = {each.pid for supervisor in self.waiting() for each in (supervisor, *_below(supervisor))}
        return [each for each in family if each.pid not in idle]

    def family(self) -> list[psutil.Process]:
        """Return the service and all its descendants."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def workers(self) -> list[psutil.Process]:
        """Return the processes that run search, browse and plug-in tools."""
        return self._children("tools_sandbox.workers.worker")

    def _children(self, module: str) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):  # it has ended meanwhile
                if module in " ".join(child.cmdline()):
                    found.append(child)
        return found


def _name(process: psutil.Process) -> str:
    """Return the name of a process, or "" if it has ended."""
    with suppress(psutil.Error):
        return process.name()
    return ""


def _below(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []


StartService = Callable[..., Service]


@contextmanager
def running(
    config: dict[str, Any] | Path | None,
    *,
    as_nobody: bool = False,
    without_namespaces: bool = False,
    open_files: int | None = None,
    soft_open_files: int | None = None,
    env: dict[str, str] | None = None,
) -> Iterator[Service]:
    """Run a service with a config or its file. As root, the caller may ask for another kind of user.

    Without a file, it preloads nothing by default.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        if isinstance(config, Path):
            file = config
        else:
            config, file = {**(config or {})}, folder / "config.yaml"
            config["python"] = {"preload": [], **config.get("python", {})}
            file.write_text(yaml.safe_dump(config))
        arguments = ["--port", "0", "--config", str(file)]
        before = _AS_NOBODY * as_nobody + WITHOUT_NAMESPACES * without_namespaces
        if open_files is not None:
            before += _WITH_OPEN_FILES.format(open_files, open_files)
        if soft_open_files is not None:
            before += _WITH_OPEN_FILES.format(soft_open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        start = ["-c", before + _START] if before else ["-m", "tools_sandbox"]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *start, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready http://127.0.0.1:"), (folder / "log").read_text()
            yield Service(process, line.split()[1], folder / "log")
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()  # a service that does not end has failed its test


RunCode = Callable[..., Outcome]


@contextmanager
def python_pool(limits: Limits, **config: Any) -> Iterator[RunCode]:
    """Run a pool of python calls in this process. Yields a function that runs code and returns its outcome."""
    pool = PythonPool(PythonConfig(**{"preload": (), "ahead": 0, **config}), limits)
    pool.start()
    try:
        yield lambda code, timeout_s=20.0, **more: asyncio.run(pool.run(code, timeout_s, **more))
    finally:
        pool.close()


def metric(service: Any, name: str, **labels: str) -> float:
    page = requests.get(f"{service.url}/metrics", timeout=5).text
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def refused_start(*arguments: str) -> str:
    """Start a service that cannot start, and return the one line that it writes to stderr."""
    result = subprocess.run(
        [sys.executable, "-m", "tools_sandbox", *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def wait_until(condition: Callable[[], bool], *, state: Callable[[], object] = lambda: "") -> None:
    """Wait for a condition, with a limit that only a broken service reaches, since the machine may be busy.

    state: what is known then, for the message.
    """
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, state()
        time.sleep(0.02)


def running_calls(service: Any) -> int:
    return int(requests.get(f"{service.url}/health", timeout=5).json()["running"])


def wait_until_gone(family: list[psutil.Process]) -> None:
    """Wait until the processes have ended. Zombies count as ended, since init may reap them late."""
    deadline = time.monotonic() + 20
    while alive := [each for each in family if is_alive(each)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


def read_walls(process: psutil.Process) -> tuple[str, int, str]:
    """Return the mode of the system call filter, the capabilities, and no_new_privs of a process."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return status["Seccomp"], int(status["CapEff"], 16), status["NoNewPrivs"]


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
