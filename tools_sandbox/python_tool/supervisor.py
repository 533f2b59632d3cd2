"""The process above one call: keeps its time, takes its output, ends its whole tree, writes its outcome.

It dies with its call: the socket to the service is its lifeline, and the end of that stream (the service cancelled
the call, or was killed) ends the tree at once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import stat
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tools_sandbox.python_tool import isolation
from tools_sandbox.python_tool.isolation import Isolation
from tools_sandbox.python_tool.wire import HEADER, Outcome, Request
from tools_sandbox.python_tool.worker import run_init

_CHUNK = 1 << 16


@dataclass
class _Kept:
    """One output stream of which only a part is kept, while all of it is read so that the writer never blocks."""

    limit_bytes: int
    tail: bool
    """Keep the end (where a traceback says what went wrong) instead of the beginning."""
    total_bytes: int = 0
    data: bytearray = field(default_factory=bytearray)

    def add(self, chunk: bytes) -> None:
        self.total_bytes += len(chunk)
        if self.tail:
            self.data += chunk
            if len(self.data) > 2 * self.limit_bytes:
                del self.data[: -self.limit_bytes]
        elif len(self.data) < self.limit_bytes:
            self.data += chunk[: self.limit_bytes - len(self.data)]

    def text(self, limit_chars: int) -> str:
        """What was kept, at most limit_chars characters, plus a note if that is not all."""
        text = self.data.decode("utf-8", "replace")
        if self.total_bytes <= len(self.data) and len(text) <= limit_chars:
            return text.rstrip("\n")
        note = f"[output truncated: {self.total_bytes} bytes in all, the {{}} {limit_chars} characters are shown]"
        if self.tail:
            return f"{note.format('last')}\n{text[-limit_chars:]}".rstrip("\n")
        return f"{text[:limit_chars]}\n{note.format('first')}"


def supervise(connection: socket.socket, walls: Isolation, root: str) -> None:
    """Serve the one call that comes over a connection. root: where working directories may be made."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = _receive(connection)
    if request is None:
        return
    isolation.enter_supervisor(walls)
    uid = isolation.worker_uid(walls)
    folder = root if walls.files else _make_folder(root, uid)
    try:
        outcome = _run_call(connection, walls, request, folder, uid)
    finally:
        if folder != root:
            _remove_folder(folder)
    if outcome is not None:
        with contextlib.suppress(OSError):  # the service is gone
            connection.sendall(outcome.encode())


def _receive(connection: socket.socket) -> Request | None:
    """The request; none if the service was gone before it was complete."""

    def exactly(size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size and (part := connection.recv(size - len(parts))):
            parts += part
        return bytes(parts)

    header = exactly(HEADER.size)
    if len(header) < HEADER.size:
        return None
    size = HEADER.unpack(header)[0]
    body = exactly(size)
    return Request.decode(body) if len(body) == size else None


def _run_call(connection: socket.socket, walls: Isolation, request: Request, folder: str, uid: int) -> Outcome | None:
    """Run the call to its end; none if the service went away. All descendants are gone on return."""
    (out_read, out_write), (err_read, err_write), (status_read, status_write) = os.pipe(), os.pipe(), os.pipe()
    deadline = time.monotonic() + request.time_s
    pid = os.fork()
    if pid == 0:
        connection.close()
        run_init(walls, request, folder=folder, uid=uid, streams=(out_write, err_write), status=status_write)
    for descriptor in (out_write, err_write, status_write):
        os.close(descriptor)
    # Four bytes are the longest UTF-8 character: enough for the characters that are shown.
    limit_bytes = 4 * request.output_chars
    streams = {out_read: _Kept(limit_bytes, tail=False), err_read: _Kept(limit_bytes, tail=True)}
    try:
        ended_by = _watch(connection, streams, status_read, deadline)
        report = os.read(status_read, _CHUNK).decode() if ended_by == "status" else ""
    finally:
        isolation.end_tree(pid)
    # Every writer is gone, so what is left in the pipes is all there will ever be.
    for descriptor, kept in streams.items():
        while chunk := os.read(descriptor, _CHUNK):
            kept.add(chunk)
    if ended_by == "cancelled":
        return None
    return _judge(request, report, ended_by == "deadline", streams[out_read], streams[err_read])


def _watch(connection: socket.socket, streams: dict[int, _Kept], status: int, deadline: float) -> str:
    """Read output until something ends the call: "status", "deadline" or "cancelled"."""
    with selectors.DefaultSelector() as selector:
        for source in (connection.fileno(), status, *streams):
            selector.register(source, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                if key.fd == connection.fileno():
                    return "cancelled"
                if key.fd == status:
                    return "status"
                chunk = os.read(key.fd, _CHUNK)
                if chunk:
                    streams[key.fd].add(chunk)
                else:
                    selector.unregister(key.fd)
    return "deadline"


def _judge(request: Request, report: str, late: bool, out: _Kept, err: _Kept) -> Outcome:
    """Status and text of an ended call. report: what the init process wrote, see `run_init`."""
    shown = request.output_chars
    if late:
        return _out_of_time(f"the code did not finish within {request.time_s:g} s (wall-clock time)", out, shown)
    if report.startswith("!"):
        return Outcome("broken", f"the call could not be isolated: {report[1:].splitlines()[0]}")
    if not report:
        return Outcome("error", "The code ended its own sandbox before it finished.")
    code = os.waitstatus_to_exitcode(int(report))
    if code == 0:
        return Outcome("ok", out.text(shown))
    if code == -signal.SIGXCPU:
        return _out_of_time(f"the code used more than {request.limits.cpu_s} s of CPU time", out, shown)
    text = err.text(shown)
    if code < 0:
        text = f"{text}\nThe code was ended by signal {_signal_name(-code)}.".lstrip("\n")
    return Outcome("error", text or f"The code ended with exit code {code} and no message.")


def _out_of_time(what: str, out: _Kept, shown: int) -> Outcome:
    text = out.text(shown)
    return Outcome("timeout", f"Time limit exceeded: {what}." + (f"\nOutput until then:\n{text}" if text else ""))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)


def _make_folder(root: str, uid: int) -> str:
    folder = tempfile.mkdtemp(dir=root)
    if uid != os.getuid():
        os.chown(folder, uid, uid)
    return folder


def _remove_folder(folder: str) -> None:
    """Remove a folder whose content may have been locked by the code that made it."""
    for path, _, _ in os.walk(folder):  # top down: each level is opened before the walk descends into it
        with contextlib.suppress(OSError):
            for entry in os.scandir(path):
                if entry.is_dir(follow_symlinks=False):
                    Path(entry.path).chmod(stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)
