"""The isolation of a call from this machine. To add a wall, change this module.

The zygote calls `prepare` once. It tries real calls in disposable processes, beginning with the strongest kind, and
returns the walls that stand. Each call then raises exactly these walls in three steps (supervisor, init, worker).
If a wall stood in the trial and fails in a call, that call fails: no call silently runs with less than the log has
promised.
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
from tools_sandbox.utils import linux, process_tree

_UID_BASE = 0x7000_0000
"""No common numbering uses ids from here on. The user id of a call is this base plus the pid of its supervisor."""
_MIB = 1 << 20
_MEMORY_RESERVE_MIB = 64
_OWN_PROCESSES = 3
"""Supervisor, the measurement of its watchdog, and init, which also count for the call's user."""
_PENDING_SIGNALS = 128
"""Queued signals and timers that signal. The kernel counts them per user, so one call could exhaust them for all."""
_OTHER_CALLS = 16
"""If RLIMIT_NPROC counts everything that the service's user runs, it is only a last bound. It then adds the tasks that
run on the machine when the call begins, and those that this many other calls may start meanwhile."""
_TRIAL_SLOT = 0xFFFF_FFFF
"""A slot that no call has, since calls may begin right after the trial."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """The walls that stand, and the objects that each call needs to raise them."""

    walls: Walls
    groups: cgroups.Groups | None
    filter_program: bytes


def prepare(folder: str, limits: WorkerLimits) -> Isolation:
    """Raise the shared walls around this process and find out which further walls a call can raise.

    folder: an empty directory. Calls without their own view work in it; otherwise the view is built there.
    limits: limits of the calls, which the trial uses too.
    Must run before any thread starts, since only a single-threaded process can enter a user namespace.
    Raises OSError if this kernel offers no way to end all processes of a call.
    """
    files.forget_other_paths()
    no_core_handler = _forbid_core_dumps()
    groups, why_no_groups = cgroups.find()  # first, while the machine's files are still visible
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
            no_core_handler=no_core_handler,
        )
        program = seccomp.program(among_others=not walls.processes) if filters else b""
        isolation = Isolation(walls, groups, program)
        why_not = _why_not(partial(_try_call, isolation, limits, folder))
        if not why_not:
            break
    else:
        raise OSError(f"no call can be isolated on this machine in any way: {why_not}")
    if not walls.processes and not process_tree.can_list_children():
        raise OSError("neither PID namespaces nor /proc/.../children: a call's processes could not be ended")
    return isolation


def enter_supervisor(isolation: Isolation, slot: int) -> int:
    """Raise the supervisor's walls. The next process that it forks is the first of the call's tree.

    slot: the slot of the call among the service's calls. No other running call has it. Returns the call's user id.
    """
    walls = isolation.walls
    linux.adopt_orphans()
    if isolation.groups is not None:
        isolation.groups.enter(slot)
    uid = _UID_BASE + os.getpid() if walls.own_uid else os.getuid()
    if walls.user_namespace:
        gid = os.getgid()
        if walls.own_uid:
            _become(uid)
            gid = uid
        # The capabilities end at this namespace. Outside, the call has no privileges that it could regain.
        _enter_user_namespace((files.INSIDE_ID, uid), (files.INSIDE_ID, gid), linux.CLONE_NEWPID)
    elif walls.processes:
        linux.unshare(linux.CLONE_NEWPID)
    linux.make_dumpable(False)
    return uid


def enter_init(isolation: Isolation, limits: WorkerLimits, folder: str) -> None:
    """Raise the walls of the first process of the call's tree: private files and the working directory.

    folder: working directory of a call without a mount namespace.
    """
    linux.die_with_parent(signal.SIGKILL)
    linux.make_dumpable(True)  # otherwise root owns the file
    with suppress(OSError):  # if memory runs out, the kernel should kill the call, not its supervisor
        Path("/proc/self/oom_score_adj").write_text("500", "ascii")
    linux.make_dumpable(False)
    if isolation.walls.files:
        linux.unshare(linux.CLONE_NEWNS)
        files.enter_call(limits.disk_mib)
    else:
        os.chdir(folder)


def enter_worker(isolation: Isolation, limits: WorkerLimits, uid: int) -> int:
    """Set the limits and drop the privileges of the process that will run foreign code. None of this can be undone.

    Returns the size of its address space in bytes at this point, for `bound_memory`.
    """
    walls = isolation.walls
    folder = str(Path.cwd())
    preloaded_bytes = 0
    with suppress(OSError):  # there may be no /proc
        preloaded_bytes = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    os.setsid()
    others = 0 if walls.counts_processes() else _tasks_of_machine() + _OTHER_CALLS * limits.processes
    _limit(resource.RLIMIT_NPROC, limits.processes + _OWN_PROCESSES + others)
    _limit(resource.RLIMIT_FSIZE, limits.file_mib * _MIB)
    for kind in (resource.RLIMIT_MSGQUEUE, resource.RLIMIT_RTPRIO):
        _limit(kind, 0)
    _limit(resource.RLIMIT_MEMLOCK, 1 << 16)
    _limit(resource.RLIMIT_SIGPENDING, _PENDING_SIGNALS)
    # The soft limit sends a signal of its own. The hard limit, one second later, cannot be caught.
    _limit(resource.RLIMIT_CPU, limits.cpu_s, reserve=1)
    if walls.own_uid and not walls.user_namespace:
        _become(uid)
    linux.drop_capabilities()
    linux.forbid_new_privileges()
    linux.die_with_parent(signal.SIGKILL)
    if walls.landlock:
        landlock.restrict(walls.landlock, files.rules_inside() if walls.files else files.rules_outside(folder))
    # After Landlock, which opens the paths of its rules while the sandbox's own descriptors are still open.
    _limit(resource.RLIMIT_NOFILE, limits.open_files)
    watched = "memory" not in walls.groups
    # The watchdog may read the mappings of a process only if it is dumpable. There are no core dumps in either case.
    linux.make_dumpable(watched)
    if watched:
        # A huge page of which only one part is still mapped would count as that part.
        linux.disable_huge_pages()
    if isolation.filter_program:
        linux.filter_system_calls(isolation.filter_program)
    return preloaded_bytes


def bound_memory(limits: WorkerLimits, held_bytes: int) -> None:
    """Limit the memory that the worker may use beyond what it brings to the foreign code.

    held_bytes: size of the preloaded modules and of a session's state.
    """
    # The reserve up to the hard limit lets a MemoryError still be reported.
    _limit(resource.RLIMIT_AS, held_bytes + limits.memory_mib * _MIB, reserve=_MEMORY_RESERVE_MIB * _MIB)


def release_memory_reserve() -> None:
    """Let the report of a failure use the memory that was reserved for it."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _tasks_of_machine() -> int:
    """Return the number of processes and threads on this machine."""
    return int(Path("/proc/loadavg").read_text("ascii").split()[3].partition("/")[2])


def _limit(kind: int, value: int, reserve: int = 0) -> None:
    """Lower a limit, with the hard one `reserve` above the soft one. A limit that is already lower stays."""
    hard = resource.getrlimit(kind)[1]
    soft, top = (bound if hard == resource.RLIM_INFINITY else min(bound, hard) for bound in (value, value + reserve))
    resource.setrlimit(kind, (soft, top))


def _forbid_core_dumps() -> bool:
    """Forbid core dumps of this process and its children. Return whether that includes a handler of the machine.

    At a limit of 0, Linux still starts the handler that /proc/sys/kernel/core_pattern names, as root. At exactly 1 it
    does not (Linux, fs/coredump.c), and 1 byte is too little for a file.
    """
    with suppress(ValueError):  # the machine has set the hard limit to 0
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        return True
    return False


def _become(uid: int) -> None:
    """Change to a user id for good. Raises PermissionError also if that user cannot read Python's modules."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if folder := files.unreadable():
        raise PermissionError(f"user {uid} cannot read {folder}")


def _leave_namespaces() -> bool:
    """Replace the machine's network, mounts, host name and IPC by empty namespaces. Return whether that worked."""
    # All calls share one network namespace. It has no interface, so nothing can pass. One per call would be slow to
    # create and, under load, keep the kernel busy with the cleanup of hundreds of them.
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
    """Become the owner of new namespaces as an ordinary user, if the machine allows that. Ids are (inside, outside)."""
    # After a change of user, a process does not own its files in /proc until this call.
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
    """Try all steps of a call. Raises OSError if one of them fails."""
    if isolation.groups is not None:
        isolation.groups.open_slot(_TRIAL_SLOT, limits.memory_mib, limits.processes)
    uid = enter_supervisor(isolation, _TRIAL_SLOT)

    def init() -> None:
        enter_init(isolation, limits, folder)
        if why_not := _why_not(lambda: bound_memory(limits, enter_worker(isolation, limits, uid))):
            raise OSError(why_not)

    if why_not := _why_not(init):
        raise OSError(why_not)


def _works(step: Callable[[], None]) -> bool:
    return not _why_not(step)


def _why_not(step: Callable[[], None]) -> str:
    """Try a step in a disposable process. Return how it failed, or "" if it succeeded."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        result = "it did not end"
        try:
            step()
            result = "."
        except BaseException as error:
            result = str(error) or type(error).__name__
        finally:
            os.write(writing, result.encode(errors="backslashreplace")[:2000])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pipe.read().decode()
    os.waitpid(pid, 0)
    return "" if result == "." else result or "its process died"
