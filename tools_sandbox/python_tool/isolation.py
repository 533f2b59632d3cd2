"""How a call is separated from this machine: the one module to change when the walls get thicker.

The zygote calls `prepare` once; it tries whole calls for real, the strongest kind first, in processes that are thrown
away, and returns the walls that stand. Each call then raises exactly these, in three steps (supervisor, init, worker).
A wall that stood in the trial and fails in a call is an error of that call: no call silently runs with less than the
log promised.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from tools_sandbox.python_tool import cgroups, files, landlock, seccomp
from tools_sandbox.python_tool.walls import Walls, WorkerLimits
from tools_sandbox.utils import linux

_UID_BASE = 0x7000_0000
"""Ids from here on belong to nobody in any common numbering; one a call: base + pid of its supervisor."""
_MIB = 1 << 20
_MEMORY_RESERVE_MB = 64
_OWN_PROCESSES = 2
"""Supervisor and init, which count as the call's user's too."""
_PENDING_SIGNALS = 128
"""Queued signals and timers that signal, which the kernel counts for a user: without a limit of its own a call could
take them all."""
_OTHER_CALLS = 16
"""Where RLIMIT_NPROC counts all that the service's user runs it is a last bound, beside what runs on the machine when
the call begins and what this many other calls may start meanwhile."""
_TRIAL_PLACE = 0xFFFF_FFFF
"""Not a place of calls, which may follow at once."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """What stands, and what of it each call needs at hand."""

    walls: Walls
    groups: cgroups.Groups | None
    filter_program: bytes


def prepare(folder: str, limits: WorkerLimits) -> Isolation:
    """Raise the shared walls around this process and find out which others a call can raise.

    folder: an empty directory; where calls without a view of their own work, else the place to build that view.
    limits: those of the calls; the trial has them too.
    Must run before any thread starts, since only a process of one thread can enter a user namespace.
    Raises OSError if this kernel offers no way at all to end a call's whole process tree.
    """
    files.forget_other_paths()
    groups, why_no_groups = cgroups.find()  # now, while the machine's own files are still in sight
    namespaces = _leave_namespaces()
    view = namespaces and _works(lambda: _build_view_apart(folder))
    if view:
        files.build_root(folder)
    filters = seccomp.available() and _works(lambda: _filter(seccomp.program(among_others=True)))
    version = landlock.abi()
    as_root = os.getuid() == 0
    kinds = ((True, True), (True, False), (False, False)) if view else ((True, False), (False, False))
    for (processes, user_namespace), own_uid in product(kinds, (True, False) if as_root else (False,)):
        walls = Walls(
            network=namespaces,
            processes=processes and namespaces,
            files=view,
            user_namespace=user_namespace,
            own_uid=own_uid,
            system_calls=filters,
            landlock=version,
            groups=() if groups is None else groups.controllers,
            why_no_groups=why_no_groups,
        )
        program = seccomp.program(among_others=not walls.processes) if filters else b""
        isolation = Isolation(walls, groups, program)
        why_not = _why_not(partial(_try_call, isolation, limits, folder))
        if not why_not:
            break
    else:
        raise OSError(f"no call can be isolated on this machine in any way: {why_not}")
    if not walls.processes and not _children_file(os.getpid()).exists():
        raise OSError("neither PID namespaces nor /proc/.../children: a call's processes could not be ended")
    return isolation


def enter_supervisor(isolation: Isolation, place: int) -> int:
    """In the supervisor: the next process it forks is the first of the call's tree. Returns the call's user id.

    place: which of the service's places the call has; no other running call has it.
    """
    walls = isolation.walls
    linux.adopt_orphans()
    if isolation.groups is not None:
        isolation.groups.enter(place)
    uid = _UID_BASE + os.getpid() if walls.own_uid else os.getuid()
    if walls.user_namespace:
        gid = os.getgid()
        if walls.own_uid:
            _become(uid)
            gid = uid
        # Its capabilities end at this namespace: outside of it the call has no privilege that could be given back.
        _enter_user_namespace((files.INSIDE_ID, uid), (files.INSIDE_ID, gid), linux.CLONE_NEWPID)
    elif walls.processes:
        linux.unshare(linux.CLONE_NEWPID)
    linux.make_dumpable(False)
    return uid


def enter_init(isolation: Isolation, limits: WorkerLimits, folder: str) -> None:
    """In the first process of the call's tree: private files, and the working directory.

    folder: directory that takes the place of the private one where there is no mount namespace.
    """
    linux.die_with_parent(signal.SIGKILL)
    linux.make_dumpable(True)  # else the file is not its own
    with suppress(OSError):  # short of memory, the kernel shall take the call and not its supervisor
        Path("/proc/self/oom_score_adj").write_text("500", "ascii")
    linux.make_dumpable(False)
    if isolation.walls.files:
        linux.unshare(linux.CLONE_NEWNS)
        files.enter_call(limits.disk_mb)
    else:
        os.chdir(folder)


def enter_worker(isolation: Isolation, limits: WorkerLimits, uid: int) -> int:
    """In the process that will run foreign code: limits on, privileges off. Nothing here can be undone.

    Returns the bytes of address space it has by then, for `bound_memory`.
    """
    walls = isolation.walls
    folder = str(Path.cwd())
    preloaded_bytes = 0
    with suppress(OSError):  # where there could be no /proc
        preloaded_bytes = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    os.setsid()
    others = 0 if walls.counts_processes() else _tasks_of_machine() + _OTHER_CALLS * limits.processes
    _limit(resource.RLIMIT_NPROC, limits.processes + _OWN_PROCESSES + others)
    _limit(resource.RLIMIT_FSIZE, limits.file_mb * _MIB)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_RTPRIO):
        _limit(kind, 0)
    _limit(resource.RLIMIT_MEMLOCK, 1 << 16)
    _limit(resource.RLIMIT_SIGPENDING, _PENDING_SIGNALS)
    # The soft limit's signal can be told from other ends; the hard one a second later cannot be caught.
    _limit(resource.RLIMIT_CPU, limits.cpu_s, reserve=1)
    if walls.own_uid and not walls.user_namespace:
        _become(uid)
    linux.drop_capabilities()
    linux.forbid_new_privileges()
    linux.die_with_parent(signal.SIGKILL)
    if walls.landlock:
        landlock.restrict(walls.landlock, files.rules_inside() if walls.files else files.rules_outside(folder))
    # After Landlock, which opens what its rules name while the sandbox's own descriptors are still there.
    _limit(resource.RLIMIT_NOFILE, limits.open_files)
    linux.make_dumpable(False)
    if isolation.filter_program:
        linux.filter_system_calls(isolation.filter_program)
    return preloaded_bytes


def bound_memory(limits: WorkerLimits, held_bytes: int) -> None:
    """In the same process, when it has what it brings to the foreign code: how much more it may have.

    held_bytes: what was preloaded, and the state of a session.
    """
    # The reserve up to the hard limit lets a MemoryError still be reported.
    _limit(resource.RLIMIT_AS, held_bytes + limits.memory_mb * _MIB, reserve=_MEMORY_RESERVE_MB * _MIB)


def release_memory_reserve() -> None:
    """In a worker whose code has failed: let the report of the failure use the memory kept for it."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def end_tree(init_pid: int) -> None:
    """In the supervisor: kill and reap every descendant, also those that left their parent.

    A PID namespace ends with its first process. Without one the worker leads a process group that the filter lets none
    of its descendants leave. A signal to the group meets all of them in one moment, also those that are just being
    forked; killed one after the other, a fork bomb would grow faster.

    init_pid: the first process of the tree, the supervisor's only child of its own making.
    """
    own_group = os.getpgrp()
    known = [init_pid]  # some kernels do not tell a process's children
    while True:
        children, known = _children(os.getpid()) or known, []  # once reaped, its number may be another's
        # The worker is init's child; when it has ended, what it has left behind is ours.
        for pid in [*(below for child in children for below in _children(child)), *children]:
            with suppress(ProcessLookupError, PermissionError):
                group = os.getpgid(pid)
                if group == own_group:
                    os.kill(pid, signal.SIGKILL)
                else:
                    os.killpg(group, signal.SIGKILL)
        try:
            # An orphan comes to us only when its parent is gone, so look again after every end.
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _tasks_of_machine() -> int:
    """Processes and threads that run on this machine."""
    return int(Path("/proc/loadavg").read_text("ascii").split()[3].partition("/")[2])


def _children_file(pid: int) -> Path:
    return Path(f"/proc/{pid}/task/{pid}/children")


def _children(pid: int) -> list[int]:
    """Processes that the first thread of a process has forked or adopted."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in _children_file(pid).read_text("ascii").split()]
    return []


def _limit(kind: int, value: int, reserve: int = 0) -> None:
    """Lower a limit, the hard one to `reserve` above the soft one; one that is already lower stays."""
    hard = resource.getrlimit(kind)[1]
    soft, top = (bound if hard == resource.RLIM_INFINITY else min(bound, hard) for bound in (value, value + reserve))
    resource.setrlimit(kind, (soft, top))


def _become(uid: int) -> None:
    """Change to a user id for good; PermissionError also if that user could not read Python's own modules."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if folder := files.unreadable():
        raise PermissionError(f"user {uid} cannot read {folder}")


def _leave_namespaces() -> bool:
    """Leave the machine's network, mounts, host name and IPC for ones without anything in them."""
    # One network for all calls: it has no interface, so nothing passes; one a call would cost its creation
    # and, under load, the kernel's slow cleanup of hundreds of them.
    shared = linux.CLONE_NEWNET | linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    with suppress(OSError):
        linux.unshare(shared)
        return True
    uid, gid = os.getuid(), os.getgid()
    if not _works(lambda: _enter_user_namespace((uid, uid), (gid, gid), shared)):
        return False
    _enter_user_namespace((uid, uid), (gid, gid), shared)
    return True


def _enter_user_namespace(uid: tuple[int, int], gid: tuple[int, int], more: int) -> None:
    """Become master of new namespaces as an ordinary user (where the machine allows that). Ids: (inside, outside)."""
    # A change of user makes a process's own files in /proc another's, until this.
    linux.make_dumpable(True)
    linux.unshare(linux.CLONE_NEWUSER | more)
    ids = ("uid_map", "{} {} 1".format(*uid)), ("gid_map", "{} {} 1".format(*gid))
    for name, content in (("setgroups", "deny"), *ids):
        Path(f"/proc/self/{name}").write_text(content, "ascii")


def _build_view_apart(folder: str) -> None:
    linux.unshare(linux.CLONE_NEWNS)
    files.build_root(folder)


def _filter(program: bytes) -> None:
    linux.forbid_new_privileges()
    linux.filter_system_calls(program)


def _try_call(isolation: Isolation, limits: WorkerLimits, folder: str) -> None:
    """All steps of a call; OSError if one of them fails."""
    if isolation.groups is not None:
        isolation.groups.open_place(_TRIAL_PLACE, limits.memory_mb, limits.processes)
    uid = enter_supervisor(isolation, _TRIAL_PLACE)

    def init() -> None:
        enter_init(isolation, limits, folder)
        if why_not := _why_not(lambda: bound_memory(limits, enter_worker(isolation, limits, uid))):
            raise OSError(why_not)

    if why_not := _why_not(init):
        raise OSError(why_not)


def _works(step: Callable[[], None]) -> bool:
    return not _why_not(step)


def _why_not(step: Callable[[], None]) -> str:
    """Try a step in a process that is thrown away: how it failed; empty if it did not."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "it did not end"
        try:
            step()
            said = "."
        except BaseException as error:
            said = str(error) or type(error).__name__
        finally:
            os.write(writing, said.encode(errors="backslashreplace")[:2000])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return "" if said == "." else said or "its process died"
