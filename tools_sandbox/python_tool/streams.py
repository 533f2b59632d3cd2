"""The output of a call that is kept, and the outcome of a call that has ended."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass, field

from tools_sandbox.python_tool.protocol import CHUNK, Outcome, Request
from tools_sandbox.python_tool.state import HEADER as STATE_HEADER
from tools_sandbox.python_tool.state import is_complete_state
from tools_sandbox.python_tool.walls import WorkerLimits

_PASS_ON_S = 30.0
"""Seconds for the service to take a part of a state."""


@dataclass
class CapturedStream:
    """An output stream that is read completely, so that its writer never blocks, and kept in part."""

    limit_bytes: int
    tail: bool
    """Keep the end (where a traceback names the error) instead of the beginning."""
    total_bytes: int = 0
    data: bytearray = field(default_factory=bytearray)

    def add(self, chunk: bytes) -> None:
        """Add the next bytes of the stream."""
        self.total_bytes += len(chunk)
        if self.tail:
            self.data += chunk
            if len(self.data) > 2 * self.limit_bytes:
                del self.data[: -self.limit_bytes]
        elif len(self.data) < self.limit_bytes:
            self.data += chunk[: self.limit_bytes - len(self.data)]

    @property
    def is_cut(self) -> bool:
        """Whether more has arrived than is kept."""
        return self.total_bytes > len(self.data)

    def text(self, limit_chars: int) -> str:
        """Return the kept part, at most limit_chars characters, with a note if the stream was longer."""
        text = self.data.decode("utf-8", "replace")
        if not self.is_cut and len(text) <= limit_chars:
            return text.rstrip("\n")
        note = f"[output truncated: {self.total_bytes} bytes in all, the {{}} {limit_chars} characters are shown]"
        if self.tail:
            return f"{note.format('last')}\n{text[-limit_chars:]}".rstrip("\n")
        return f"{text[:limit_chars]}\n{note.format('first')}"


@dataclass
class StateStream:
    """The state of a session, which is passed on to the service as it arrives, up to a limit."""

    connection: socket.socket
    limit_bytes: int
    total_bytes: int = 0
    begin: bytes = b""

    @property
    def is_cut(self) -> bool:
        """Whether more has arrived than is passed on."""
        return self.total_bytes > self.limit_bytes

    @property
    def is_complete(self) -> bool:
        """Whether a whole state has been passed on."""
        return not self.is_cut and is_complete_state(self.begin, self.total_bytes)

    def add(self, chunk: bytes) -> None:
        """Pass on the next bytes. Raises OSError if the service has gone, or takes nothing for a long time."""
        self.total_bytes += len(chunk)
        self.begin += chunk[: STATE_HEADER.size - len(self.begin)]
        if not self.is_cut:
            self.connection.settimeout(_PASS_ON_S)
            self.connection.sendall(CHUNK.pack(len(chunk)) + chunk)


def judge(
    request: Request, limits: WorkerLimits, ended_by: str, report: str, out: CapturedStream, err: CapturedStream
) -> Outcome:
    """Return status and text of a call that has ended.

    ended_by: "status" (the worker ended), "deadline", or the bound of the whole call that it broke: "CPU", "memory",
    "processes", "output", "state". report: message of the init process, see `worker.run_init`.
    """
    shown = request.output_chars
    out_of_time = {
        "deadline": f"the code did not finish within {request.time_s:g} s (wall-clock time)",
        "CPU": f"the code used more than {limits.cpu_s} s of CPU time",
    }
    too_much = {
        "output": f"the code wrote more than {request.output_mib} MiB of output",
        "state": f"the code wrote more than {request.state_mib} MiB to the descriptor of the session's state",
        "processes": f"the code had more than {limits.processes} processes",
        "memory": f"the processes of the code used more than {limits.memory_mib} MiB of memory",
    }
    if ended_by in too_much:
        return _ended("error", f"Ended: {too_much[ended_by]}.", out.text(shown))
    status = None if ended_by in out_of_time or not report or report[0] == "!" else int(report)
    code = None if status is None else os.waitstatus_to_exitcode(status)
    if ended_by in out_of_time or code == -signal.SIGXCPU:
        what = out_of_time.get(ended_by, out_of_time["CPU"])
        return _ended("timeout", f"Time limit exceeded: {what}.", out.text(shown))
    if code is None:
        if report:
            return broken(report)
        return Outcome("error", "The code ended its own sandbox before it finished.")
    if code == 0:
        return Outcome("ok", out.text(shown))
    text = err.text(shown)
    if code < 0:
        text = f"{text}\nThe code was ended by signal {_signal_name(-code)}.".lstrip("\n")
    return Outcome("error", text or f"The code ended with exit code {code} and no message.")


def broken(report: str) -> Outcome:
    """Return the outcome of a call that never began. report: see `judge`."""
    why = report[1:].splitlines()[0] if report.startswith("!") else "its processes died before it began"
    return Outcome("broken", f"the call could not be isolated: {why}")


def _ended(status: str, why: str, text: str) -> Outcome:
    return Outcome(status, why + (f"\nOutput until then:\n{text}" if text else ""))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)
