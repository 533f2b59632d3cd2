"""The process above one call: keeps its time, takes its output, ends its whole tree, writes its outcome.

It dies with its call: the socket to the service is its lifeline, and the end of that stream (the service cancelled
the call, or was killed) ends the tree at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tools_sandbox.python_tool import isolation as walls_of
from tools_sandbox.python_tool import state as states
from tools_sandbox.python_tool import watchdog
from tools_sandbox.python_tool.isolation import Isolation
from tools_sandbox.python_tool.streams import Kept, judge
from tools_sandbox.python_tool.watchdog import Watchdog
from tools_sandbox.python_tool.wire import HEADER, Outcome, Request
from tools_sandbox.python_tool.worker import Ends, run_init

_CHUNK = 1 << 16
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Watched:
    """What the supervisor looks at while a call runs."""

    connection: socket.socket
    status: int
    """Descriptor on which the init process reports the worker's end."""
    streams: dict[int, Kept]
    """Descriptor -> what is kept of it."""
    state: int | None
    """The one of them that carries no output but the state of a session."""
    watchdog: Watchdog
    counted_cpu_s: Callable[[], float]
    """CPU time of the call by its control group, 0 where there is none."""
    deadline: float


def supervise(connection: socket.socket, isolation: Isolation, root: str, place: int) -> None:
    """Serve the one call that comes over a connection.

    root: where working directories may be made. place: see `isolation.enter_supervisor`.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = _receive(connection)
    if request is None:
        return
    groups, limits = isolation.groups, request.limits
    killed_before, cpu_before_s = 0, 0.0
    if groups is not None:
        groups.open_place(place, limits.memory_mb, limits.processes)
        killed_before, cpu_before_s = groups.memory_kills(place), groups.cpu_s(place) or 0.0

    def counted_cpu_s() -> float:
        used_s = None if groups is None else groups.cpu_s(place)
        return 0.0 if used_s is None else used_s - cpu_before_s - time.process_time()  # without this process's own

    uid = walls_of.enter_supervisor(isolation, place)
    folder = root if isolation.walls.files else _make_folder(root, uid)
    try:
        outcome = _run_call(connection, isolation, request, folder, uid, counted_cpu_s)
    finally:
        if folder != root:
            _remove_folder(folder)
    if outcome is None:
        return
    if groups is not None and outcome.status == "error" and groups.memory_kills(place) > killed_before:
        said = f"The processes of the code used more than {limits.memory_mb} MiB of memory; one or all were ended."
        outcome = replace(outcome, text=f"{outcome.text}\n{said}")
    with contextlib.suppress(OSError):  # the service is gone
        connection.sendall(outcome.encode())


def _receive(connection: socket.socket) -> Request | None:
    """The request; none if the service was gone before it was complete."""

    def exactly(size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size and (part := connection.recv(min(size - len(parts), 1 << 20))):
            parts += part
        return bytes(parts)

    header = exactly(HEADER.size)
    if len(header) < HEADER.size:
        return None
    body_bytes, state_bytes = HEADER.unpack(header)
    body, state = exactly(body_bytes), exactly(state_bytes)
    return Request.decode(body, state) if (len(body), len(state)) == (body_bytes, state_bytes) else None


def _run_call(
    connection: socket.socket,
    isolation: Isolation,
    request: Request,
    folder: str,
    uid: int,
    counted_cpu_s: Callable[[], float],
) -> Outcome | None:
    """Run the call to its end; none if the service went away. All descendants are gone on return."""
    pipes = [os.pipe() for _ in range(4)]
    (out_read, err_read, status_read, state_read), writing = zip(*pipes, strict=True)
    deadline = time.monotonic() + request.time_s
    shared_bytes = watchdog.resident_bytes()
    pid = os.fork()
    if pid == 0:
        connection.close()
        run_init(isolation, request, folder=folder, uid=uid, ends=Ends(*writing))
    for descriptor in writing:
        os.close(descriptor)
    # Four bytes are the longest UTF-8 character: enough for the characters that are shown.
    limit_bytes = 4 * request.output_chars
    streams = {out_read: Kept(limit_bytes, tail=False), err_read: Kept(limit_bytes, tail=True)}
    streams[state_read] = state = Kept(request.state_mb * _MIB + HEADER.size, tail=False)
    watched = _Watched(
        connection, status_read, streams, state_read, Watchdog(pid, shared_bytes), counted_cpu_s, deadline
    )
    try:
        ended_by = _watch(watched, isolation, request)
        report = os.read(status_read, _CHUNK).decode() if ended_by == "status" else ""
    finally:
        walls_of.end_tree(pid)
    if ended_by == "cancelled":
        return None
    # Every writer is gone, so what is left in the pipes is all there will ever be.
    for descriptor, kept in streams.items():
        while chunk := os.read(descriptor, _CHUNK):
            kept.add(chunk)
    outcome = judge(request, ended_by, report, streams[out_read], streams[err_read])
    # The state has a stream of its own, and of a call that was ended nothing is kept.
    whole = ended_by == "status" and report and states.is_whole(bytes(state.data))
    return replace(outcome, state=bytes(state.data)) if whole else outcome


def _watch(watched: _Watched, isolation: Isolation, request: Request) -> str:
    """Read output until something ends the call; see `streams.judge` for what, or "cancelled"."""
    streams, output_left = watched.streams, request.output_mb * _MIB
    next_look = time.monotonic() + watchdog.PERIOD_S
    with selectors.DefaultSelector() as selector:
        for source in (watched.connection.fileno(), watched.status, *streams):
            selector.register(source, selectors.EVENT_READ)
        while (now := time.monotonic()) < watched.deadline:
            if now >= next_look:
                if broken := _broken_bound(watched, isolation, request):
                    return broken
                next_look = time.monotonic() + watchdog.PERIOD_S
            for key, _ in selector.select(max(0.0, min(watched.deadline, next_look) - now)):
                if key.fd == watched.connection.fileno():
                    return "cancelled"
                if key.fd == watched.status:
                    return "status"
                chunk = os.read(key.fd, _CHUNK)
                if chunk:
                    streams[key.fd].add(chunk)
                    output_left -= len(chunk) if key.fd != watched.state else 0
                else:
                    selector.unregister(key.fd)
            if output_left < 0:
                return "output"
    return "deadline"


def _broken_bound(watched: _Watched, isolation: Isolation, request: Request) -> str:
    """Which bound on the call as a whole it has broken, of those that the kernel does not keep; "" if none."""
    walls, limits = isolation.walls, request.limits
    usage = watched.watchdog.look()
    if max(usage.cpu_s, watched.counted_cpu_s()) > limits.cpu_s:
        return "CPU"
    if "memory" not in walls.groups and usage.memory_bytes > limits.memory_mb * _MIB:
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
    """Remove a folder whose content may be locked, or deeper than a path or a recursion reaches, by intent."""
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
                    # Up to the top, so that no path ever has more than one part.
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
