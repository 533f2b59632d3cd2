"""The watchdog: it measures what a call uses, for bounds on the whole call that the kernel does not enforce.

The kernel limits each process (RLIMIT_*). It limits the sum over a call's processes only with control groups. Without
them, the supervisor looks every `PERIOD_S` seconds and ends a call that exceeds its bounds.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

PERIOD_S = 0.05
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_FLAGS, _UTIME, _STIME, _CUTIME, _CSTIME, _RSS = 6, 11, 12, 13, 14, 21  # fields of /proc/PID/stat after the name
_SOCKET_BYTES = 2 * 212_992
"""Unread data that one socket of a pair can hold: a buffer of Linux's default size, and one more message."""
_NEVER_EXECUTED = 0x40
"""PF_FORKNOEXEC: the process was forked and has not executed a program since."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of all processes of a call together."""

    processes: int
    memory_bytes: int
    """Resident memory without the pages shared with the zygote, plus the buffers of sockets as if they were full."""
    cpu_s: float
    """CPU time, including processes that have ended."""


class Watchdog:
    """A repeated measurement of a process and its descendants."""

    def __init__(self, first_pid: int, shared_bytes: int) -> None:
        """shared_bytes: resident size of the first process when it was forked."""
        self._first_pid, self._shared_bytes = first_pid, shared_bytes
        self._seen_s = self._lost_s = 0.0

    def look(self, at_most: int) -> Usage:
        """Return the usage now. Processes beyond `at_most` are left out.

        When a process ends, the kernel adds its time to its parent only if the parent waits for it. Otherwise the time
        is lost and the sum over the living falls. The amount by which it falls counts as used.
        """
        usage = _look(self._first_pid, self._shared_bytes, at_most)
        for _ in range(2):
            if usage.cpu_s >= self._seen_s:
                break
            # A process may have ended between the look at its parent and the look at itself.
            again = _look(self._first_pid, self._shared_bytes, at_most)
            usage = max(usage, again, key=lambda each: each.cpu_s)
        self._lost_s += max(0.0, self._seen_s - usage.cpu_s)
        self._seen_s = usage.cpu_s
        return replace(usage, cpu_s=usage.cpu_s + self._lost_s)


def _look(first_pid: int, shared_bytes: int, at_most: int) -> Usage:
    processes = memory = ticks = descriptors = 0
    waiting = [(first_pid, True)]
    while waiting and processes <= at_most:  # a fork bomb may grow faster than this loop
        pid, shares = waiting.pop()
        with suppress(OSError, ValueError):  # it has ended meanwhile
            fields = _stat(f"/proc/{pid}")
            processes += 1
            ticks += sum(int(fields[kind]) for kind in (_UTIME, _STIME, _CUTIME, _CSTIME))
            threads = list(Path(f"/proc/{pid}/task").iterdir())
            children = [int(child) for thread in threads for child in (thread / "children").read_text("ascii").split()]
            resident = int(fields[_RSS])
            if not resident and len(threads) > 1:  # its first thread has ended, and the others hold the memory
                resident = max(int(_stat(str(thread))[_RSS]) for thread in threads)
            # Only a process forked directly from the zygote's line shares its pages. The first process adopts orphans,
            # whose origin is unknown; its own child is its eldest.
            shares = shares and bool(int(fields[_FLAGS]) & _NEVER_EXECUTED)
            memory += max(0, resident * _PAGE - shares * shared_bytes)
            adopts = pid == first_pid
            waiting += [(child, shares and not (adopts and index)) for index, child in enumerate(children)]
            descriptors += max(map(_descriptors, threads))  # they share them, but a thread that has ended has none
    # Only the call can see which of its descriptors are sockets.
    memory += min(descriptors, _sockets()) * _SOCKET_BYTES
    return Usage(processes, memory, ticks / _TICKS_A_SECOND)


def _descriptors(thread: Path) -> int:
    """Return the number of open descriptors; before Linux 6.2, the size of the table, which is larger."""
    if exact := (thread / "fd").stat().st_size:
        return exact
    lines = (thread / "status").read_text("ascii", "replace").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("FDSize:")), 0)


def _sockets() -> int:
    """Return the number of sockets in this network namespace (of all calls or of the machine), or a very large one."""
    try:
        return int(Path("/proc/self/net/sockstat").read_text("ascii").split()[2])
    except OSError:
        return sys.maxsize


def _stat(folder: str) -> list[str]:
    return Path(f"{folder}/stat").read_text("ascii", "replace").rpartition(")")[2].split()


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE
