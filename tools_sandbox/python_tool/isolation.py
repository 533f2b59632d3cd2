"""How a call is separated from this machine: the one module to change when the walls get thicker.

The zygote calls `prepare` once; it tries every wall for real, in a process that is thrown away, and returns those
that stand. Each call then raises exactly these, in three steps (supervisor, init, worker). A wall that stood in the
trial and fails in a call is an error of that call: no call silently runs with less than the log promised.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools_sandbox.python_tool import filewalls, linux

_UID_BASE = 0x7000_0000
"""Ids from here on belong to nobody in any common numbering; one a call: base + pid of its supervisor."""
_NOBODY = 65534
_MIB = 1 << 20
_MEMORY_RESERVE_MB = 64


@dataclass(frozen=True, slots=True)
class Isolation:
    """The walls that stand on this machine."""

    network: bool
    """Own network namespace without any interface, own IPC and host name; shared by the calls, not with the machine."""
    processes: bool
    """Own PID namespace a call: it sees and signals only itself, and ends as a whole."""
    files: bool
    """Own mount namespace a call: all read-only, no homes, private /tmp (which it works in), /run, /proc."""
    uid: bool
    """The call runs under a user id that is not the service's."""
    uid_per_call: bool
    """... and not another call's either."""

    def describe(self) -> str:
        """One line for the log: what is in force, what is lost."""
        walls = {
            "network": (self.network, "code can reach the network"),
            "process tree": (self.processes, "code can see other processes"),
            "file system": (self.files, "code reads and writes what its user id may"),
            "user id": (self.uid, "code runs as the service's user"),
        }
        held = [name for name, (stands, _) in walls.items() if stands]
        lost = [f"{name} ({loss})" for name, (stands, loss) in walls.items() if not stands]
        return f"in force: {', '.join(['resource limits', 'own session', *held])}; lost: {', '.join(lost) or 'nothing'}"

    def complete(self) -> bool:
        """True if no wall is missing."""
        return self.network and self.processes and self.files and self.uid


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Resource limits of a worker; see `tools_sandbox.config.Limits` for units."""

    cpu_s: int
    memory_mb: int
    file_mb: int
    disk_mb: int
    processes: int
    open_files: int


def prepare(mode: str) -> Isolation:
    """Raise the shared walls around this process and find out which others a call can raise.

    mode: see `PythonConfig.isolation`.
    Must run before any thread starts, since only a process of one thread can enter a user namespace.
    Raises OSError if this kernel offers no way at all to end a call's whole process tree.
    """
    filewalls.remember_paths()
    namespaces = mode != "process"
    network = namespaces and _share_no_network()
    processes = namespaces and _works(lambda: _in_pid_namespace(lambda: None))
    if not processes and not _children_file().exists():
        raise OSError("neither PID namespaces nor /proc/.../children: a call's processes could not be ended")
    files = processes and _works(lambda: _in_pid_namespace(lambda: filewalls.raise_walls(64)))

    def become_inside(uid: int) -> None:
        filewalls.raise_walls(64)
        _become(uid)

    def change_user(uid: int) -> None:
        # After the file walls, since these open the way to a Python inside a closed home.
        if files:
            _in_pid_namespace(lambda: become_inside(uid))
        else:
            _become(uid)

    uid_per_call = _works(lambda: change_user(_UID_BASE + os.getpid()))
    uid = uid_per_call or _works(lambda: change_user(_NOBODY))
    return Isolation(network, processes, files, uid, uid_per_call)


def enter_supervisor(walls: Isolation) -> None:
    """In the supervisor: the next process it forks is the first of the call's tree."""
    linux.adopt_orphans()
    if walls.processes:
        linux.unshare(linux.CLONE_NEWPID)


def enter_init(walls: Isolation, limits: WorkerLimits, folder: str) -> None:
    """In the first process of the call's tree: private files, and the working directory.

    folder: directory that takes the place of the private one where there is no mount namespace.
    """
    linux.die_with_parent(signal.SIGKILL)
    if walls.files:
        filewalls.raise_walls(limits.disk_mb)
    else:
        os.chdir(folder)


def enter_worker(walls: Isolation, limits: WorkerLimits, uid: int) -> None:
    """In the process that will run foreign code: limits on, privileges off. Nothing here can be undone."""
    os.setsid()
    # Without a user id of its own the limit would count every process of the service's user.
    if walls.uid_per_call:
        _limit(resource.RLIMIT_NPROC, limits.processes)
    _limit(resource.RLIMIT_NOFILE, limits.open_files)
    _limit(resource.RLIMIT_FSIZE, limits.file_mb * _MIB)
    _limit(resource.RLIMIT_CORE, 0)
    # The soft limit's signal can be told from other ends; the hard one a second later cannot be caught.
    _limit(resource.RLIMIT_CPU, limits.cpu_s, reserve=1)
    if walls.uid:
        _become(uid)
    linux.drop_capabilities()
    linux.forbid_new_privileges()
    linux.die_with_parent(signal.SIGKILL)
    # The reserve up to the hard limit lets a MemoryError still be reported.
    _limit(resource.RLIMIT_AS, limits.memory_mb * _MIB, reserve=_MEMORY_RESERVE_MB * _MIB)


def release_memory_reserve() -> None:
    """In a worker whose code has failed: let the report of the failure use the memory kept for it."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def worker_uid(walls: Isolation) -> int:
    """The user id for a call; to be asked in its supervisor. The own one if the walls have none."""
    if not walls.uid:
        return os.getuid()
    return _UID_BASE + os.getpid() if walls.uid_per_call else _NOBODY


def end_tree(init_pid: int) -> None:
    """In the supervisor: kill and reap every descendant, also those that left their session or parent.

    init_pid: the first process of the tree, the supervisor's only child of its own making.
    """
    while True:
        for pid in _children() or [init_pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            # An orphan comes to us only when its parent is gone, so look again after every end.
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children_file() -> Path:
    return Path(f"/proc/self/task/{os.getpid()}/children")


def _children() -> list[int]:
    try:
        return [int(pid) for pid in _children_file().read_text("ascii").split()]
    except FileNotFoundError:
        return []


def _limit(kind: int, value: int, reserve: int = 0) -> None:
    """Lower a limit, the hard one to `reserve` above the soft one; one that is already lower stays."""
    hard = resource.getrlimit(kind)[1]
    soft, top = (bound if hard == resource.RLIM_INFINITY else min(bound, hard) for bound in (value, value + reserve))
    resource.setrlimit(kind, (soft, top))


def _become(uid: int) -> None:
    """Change to a user id for good; PermissionError also if that user could not read Python's own modules."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    for folder in {Path(os.__file__).parent, *map(Path, sys.path)}:
        if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
            raise PermissionError(f"user {uid} cannot read {folder}")


def _share_no_network() -> bool:
    # One namespace for all calls: it has no interface, so nothing passes; one a call would cost its creation
    # and, under load, the kernel's slow cleanup of hundreds of them.
    shared = linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    try:
        linux.unshare(shared)
        return True
    except OSError:
        pass
    uid, gid = os.getuid(), os.getgid()
    if not _works(lambda: _enter_user_namespace(uid, gid, shared)):
        return False
    _enter_user_namespace(uid, gid, shared)
    return True


def _enter_user_namespace(uid: int, gid: int, more: int) -> None:
    """Become master of new namespaces as an ordinary user (where the machine allows that)."""
    linux.unshare(linux.CLONE_NEWUSER | more)
    for name, content in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path(f"/proc/self/{name}").write_text(content, "ascii")


def _in_pid_namespace(step: Callable[[], None]) -> None:
    """Do a step as the first process of a new PID namespace; OSError if one of the two fails."""
    linux.unshare(linux.CLONE_NEWPID)
    if not _works(step):
        raise OSError("the step failed inside the namespace")


def _works(step: Callable[[], None]) -> bool:
    """Try a step in a process that is thrown away."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            step()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0
