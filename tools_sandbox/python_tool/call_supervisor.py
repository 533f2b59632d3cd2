"""The supervisor of one call: it enforces the time limit, reads the output, ends all processes, writes the outcome.

A supervisor lives only as long as its call. The socket to the service is its lifeline: when the stream ends because the
service cancelled the call or was killed, the supervisor ends the call's processes at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import selectors
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from tools_sandbox.python_tool import watchdog
from tools_sandbox.python_tool.isolation import Isolation, enter_supervisor
from tools_sandbox.python_tool.protocol import Outcome, Request, read_head
from tools_sandbox.python_tool.streams import CapturedStream, StateStream, broken, judge
from tools_sandbox.python_tool.walls import Walls, WorkerLimits
from tools_sandbox.python_tool.watchdog import Watchdog
from tools_sandbox.python_tool.worker import ALONE, Ends, run_init
from tools_sandbox.utils import linux
from tools_sandbox.utils.process_tree import end_tree

CALL_NAME = "python-call"
"""Process name from the arrival of the call on; before that, the supervisor has the zygote's name."""
_CHUNK = 1 << 16
_MIB = 1 << 20
_EXTRA_PROCESSES = 8
"""Processes that are inspected beyond the number that a kernel-enforced limit allows."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """Everything that the supervisor watches while a call runs."""

    connection: socket.socket
    status: int
    """Descriptor on which the init process reports the end of the worker."""
    streams: dict[int, CapturedStream | StateStream]
    """Captured output and the state of the session, by descriptor."""
    watchdog: Watchdog
    counted_cpu_s: Callable[[], float]
    """Return the CPU time of the call as its control group counts it; 0 without one."""
    limits: WorkerLimits
    deadline: float


def supervise(connection: socket.socket, isolation: Isolation, limits: WorkerLimits, *, root: str, slot: int) -> None:
    """Raise the walls of a call, then serve the request that arrives over the connection.

    root: folder for working directories. slot: see `isolation.enter_supervisor`.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    groups = isolation.groups
    killed_before, cpu_before_s = 0, 0.0
    if groups is not None:
        groups.open_slot(slot, limits.memory_mib, limits.processes)
        killed_before, cpu_before_s = groups.memory_kills(slot), groups.cpu_s(slot) or 0.0

    def counted_cpu_s() -> float:
        used_s = None if groups is None else groups.cpu_s(slot)
        return 0.0 if used_s is None else used_s - cpu_before_s - time.process_time()  # without this process's own

    uid = enter_supervisor(isolation, slot)
    with contextlib.ExitStack() as leftovers:
        folder = root
        if not isolation.walls.files:
            folder = _make_folder(root, uid)
            leftovers.callback(_remove_folder, folder)
        outcome = _run_call(connection, isolation, limits, folder, uid, counted_cpu_s, leftovers)
        if outcome is None:
            return
        if groups is not None and outcome.status == "error" and groups.memory_kills(slot) > killed_before:
            note = f"The processes of the code used more than {limits.memory_mib} MiB of memory; one or all were ended."
            outcome = replace(outcome, text=f"{outcome.text}\n{note}")
        with contextlib.suppress(OSError):  # the service has gone
            connection.sendall(outcome.encode())
            if groups is None:  # else the slot is free again when what is left no longer counts in its group
                connection.shutdown(socket.SHUT_WR)


def _run_call(
    connection: socket.socket,
    isolation: Isolation,
    limits: WorkerLimits,
    folder: str,
    uid: int,
    counted_cpu_s: Callable[[], float],
    leftovers: contextlib.ExitStack,
) -> Outcome | None:
    """Run the call to its end. Return None if the service has gone.

    All processes of the code have ended on return. leftovers: ends the init process, which takes the kernel a while.
    """
    reads, writes = zip(*(os.pipe() for _ in Ends._fields), strict=True)
    ours, theirs = Ends(*reads)._replace(request=writes[-1]), Ends(*writes)._replace(request=reads[-1])
    preloaded_bytes = watchdog.preloaded_bytes()
    memory_bytes = None if "memory" in isolation.walls.groups else limits.memory_mib * _MIB
    pid = os.fork()
    if pid == 0:
        for descriptor in (connection.fileno(), *ours):
            os.close(descriptor)
        run_init(isolation, limits, folder=folder, uid=uid, ends=theirs)
    leftovers.callback(end_tree, pid)
    for descriptor in theirs:
        os.close(descriptor)
    found = read_head(connection.recv)
    if found is None:  # the service does not need it any more
        return None
    if select.select([ours.status], [], [], 0)[0]:  # before there is a request, only a failure is reported
        return broken(os.read(ours.status, _CHUNK).decode())
    head, state_bytes = found
    request = Request.decode(head)
    deadline = time.monotonic() + request.time_s
    linux.name_process(CALL_NAME)
    _pass_on(connection, head, state_bytes, ours.request, deadline)
    # A UTF-8 character has at most four bytes, so this is enough for the characters that are shown.
    limit_bytes = 4 * request.output_chars
    out, err = CapturedStream(limit_bytes, tail=False), CapturedStream(limit_bytes, tail=True)
    state = StateStream(connection, request.state_mib * _MIB)
    streams: dict[int, CapturedStream | StateStream] = {ours.out: out, ours.err: err, ours.state: state}
    measured = Watchdog(pid, preloaded_bytes, memory_bytes)
    watched = _Watched(connection, ours.status, streams, measured, counted_cpu_s, limits, deadline)
    try:
        ended_by = _watch(watched, isolation.walls, request.output_mib)
    except (ConnectionError, TimeoutError):  # a part of the state could not be passed on: the service has gone
        ended_by = "cancelled"
    measured.release()
    report = os.read(ours.status, _CHUNK).decode() if ended_by == "status" else ""
    if not report.endswith(ALONE):
        leftovers.close()
    if ended_by == "cancelled":
        return None
    # All writers have ended, so the pipes hold the rest of the output.
    with contextlib.suppress(OSError):  # if the service has gone, it needs no outcome either
        for descriptor, stream in streams.items():
            while chunk := os.read(descriptor, _CHUNK):
                stream.add(chunk)
    outcome = judge(request, limits, ended_by, report.removesuffix(ALONE), out, err)
    # Nothing is kept of a call that was ended from outside.
    return replace(outcome, has_state=ended_by == "status" and bool(report) and state.is_complete)


def _pass_on(
    connection: socket.socket, head: bytes | bytearray, state_bytes: int, descriptor: int, deadline: float
) -> None:
    """Pass the request to the worker piece by piece. `_watch` notices what goes wrong here."""
    os.set_blocking(descriptor, False)
    chunk = bytes(head)
    with contextlib.suppress(BrokenPipeError):  # the worker has ended
        while chunk:
            if not select.select([], [descriptor], [], max(0.0, deadline - time.monotonic()))[1]:
                break
            chunk = chunk[os.write(descriptor, chunk) :]
            if not chunk and state_bytes:
                chunk = connection.recv(min(state_bytes, _CHUNK))
                state_bytes -= len(chunk)
    os.close(descriptor)


def _watch(watched: _Watched, walls: Walls, output_mib: int) -> str:
    """Read output until something ends the call. Return what did: see `streams.judge`, or "cancelled"."""
    next_look = time.monotonic() + watchdog.PERIOD_S
    with selectors.DefaultSelector() as selector:
        for source in (watched.connection.fileno(), watched.status, *watched.streams):
            selector.register(source, selectors.EVENT_READ)
        while (now := time.monotonic()) < watched.deadline:
            if now >= next_look:
                if bound := _broken_bound(watched, walls):
                    return bound
                next_look = time.monotonic() + watchdog.PERIOD_S
            for key, _ in selector.select(max(0.0, min(watched.deadline, next_look) - now)):
                if key.fd == watched.connection.fileno():
                    return "cancelled"
                if key.fd == watched.status:
                    return "status"
                if chunk := os.read(key.fd, _CHUNK):
                    watched.streams[key.fd].add(chunk)
                else:
                    selector.unregister(key.fd)
            if too_much := _excess(watched.streams.values(), output_mib):
                return too_much
    return "deadline"


def _excess(streams: Collection[CapturedStream | StateStream], output_mib: int) -> str:
    """Return "state" or "output" if the call has written too much of it, or ""."""
    if any(each.is_cut for each in streams if isinstance(each, StateStream)):
        return "state"
    output_bytes = sum(each.total_bytes for each in streams if isinstance(each, CapturedStream))
    return "output" if output_bytes > output_mib * _MIB else ""


def _broken_bound(watched: _Watched, walls: Walls) -> str:
    """Return the bound on the whole call that it has broken, of those that the kernel does not enforce, or ""."""
    limits = watched.limits
    usage = watched.watchdog.look(limits.processes + _EXTRA_PROCESSES)
    if max(usage.cpu_s, watched.counted_cpu_s()) > limits.cpu_s:
        return "CPU"
    if "memory" not in walls.groups and usage.memory_bytes > limits.memory_mib * _MIB:
        return "memory"
    if "pids" not in walls.groups and not walls.counts_processes() and usage.processes > limits.processes:
        return "processes"
    return ""


def _make_folder(root: str, uid: int) -> str:
    folder = tempfile.mkdtemp(dir=root)
    if uid != os.getuid():
        os.chown(folder, uid, uid)
    return folder


def _remove_folder(folder: str) -> None:
    """Remove a folder. Code may have locked its content, or nested it deeper than paths or recursion reach."""
    prefix, number = secrets.token_hex(8), 0
    with contextlib.suppress(OSError):
        Path(folder).chmod(stat.S_IRWXU)
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        waiting = ["."]
        while waiting:
            name = waiting.pop()
            inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            for entry in list(os.scandir(inside)):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.name, stat.S_IRWXU, dir_fd=inside)
                    # Moved to the top level, so that no path has more than one component.
                    number += 1
                    waiting.append(f"{prefix}-{number}")
                    os.rename(entry.name, waiting[-1], src_dir_fd=inside, dst_dir_fd=top)
                else:
                    os.unlink(entry.name, dir_fd=inside)
            os.close(inside)
            if name != ".":
                os.rmdir(name, dir_fd=top)
        os.close(top)
        Path(folder).rmdir()
