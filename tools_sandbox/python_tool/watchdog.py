"""What a call uses, seen from outside, where the kernel does not bound it for the call as a whole.

A process's limits (RLIMIT_*) are the kernel's; sums over a call's processes are the kernel's with control groups only.
Elsewhere the supervisor looks every `PERIOD_S` seconds, and ends a call that is over its bounds.
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
"""What can wait unread in one socket of a pair: a buffer of Linux's size, and the message that found room in it."""
_NEVER_EXECUTED = 0x40
"""PF_FORKNOEXEC: the process came about by a fork and has not executed a program since."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all processes of a call together."""

    processes: int
    memory_bytes: int
    """Resident, without what each shares with the zygote; and the buffers of sockets, as if they were full."""
    cpu_s: float
    """Also of processes that have ended."""


class Watchdog:
    """Looks at a process and its descendants again and again."""

    def __init__(self, first_pid: int, shared_bytes: int) -> None:
        """shared_bytes: resident size of the first process when it was forked."""
        self._first_pid, self._shared_bytes = first_pid, shared_bytes
        self._seen_s = self._lost_s = 0.0

    def look(self, at_most: int) -> Usage:
        """Usage now; of more than `at_most` processes the rest is left out.

        The kernel adds the time of a process that has ended to its parent's only if the parent waits for it; else it
        is gone, and the sum over the living falls. What it fell by counts as used.
        """
        usage = _look(self._first_pid, self._shared_bytes, at_most)
        for _ in range(2):
            if usage.cpu_s >= self._seen_s:
                break
            # A process may have ended between the look at its parent and the one at itself.
            again = _look(self._first_pid, self._shared_bytes, at_most)
            usage = max(usage, again, key=lambda each: each.cpu_s)
        self._lost_s += max(0.0, self._seen_s - usage.cpu_s)
        self._seen_s = usage.cpu_s
        return replace(usage, cpu_s=usage.cpu_s + self._lost_s)


def _look(first_pid: int, shared_bytes: int, at_most: int) -> Usage:
    processes = memory = ticks = descriptors = 0
    waiting = [(first_pid, True)]
    while waiting and processes <= at_most:  # a fork bomb could grow faster than it is looked at
        pid, shares = waiting.pop()
        with suppress(OSError, ValueError):  # it has ended meanwhile
            fields = _stat(f"/proc/{pid}")
            processes += 1
            ticks += sum(int(fields[kind]) for kind in (_UTIME, _STIME, _CUTIME, _CSTIME))
            threads = list(Path(f"/proc/{pid}/task").iterdir())
            children = [int(child) for thread in threads for child in (thread / "children").read_text("ascii").split()]
            resident = int(fields[_RSS])
            if not resident and len(threads) > 1:  # its first thread has ended, the others have the memory
                resident = max(int(_stat(str(thread))[_RSS]) for thread in threads)
            # Only what was forked from the zygote, and from nothing else in between, shares its pages. Orphans come to
            # the first process, whose own child is its eldest; what they were forked from is not known any more.
            shares = shares and bool(int(fields[_FLAGS]) & _NEVER_EXECUTED)
            memory += max(0, resident * _PAGE - shares * shared_bytes)
            adopts = pid == first_pid
            waiting += [(child, shares and not (adopts and place)) for place, child in enumerate(children)]
            descriptors += max(map(_descriptors, threads))  # they share them, but one that has ended has none
    # Which of a call's descriptors are sockets only the call may see.
    memory += min(descriptors, _sockets()) * _SOCKET_BYTES
    return Usage(processes, memory, ticks / _TICKS_A_SECOND)


def _descriptors(thread: Path) -> int:
    """Open descriptors; before Linux 6.2 the places for some, which is more."""
    if exact := (thread / "fd").stat().st_size:
        return exact
    lines = (thread / "status").read_text("ascii", "replace").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("FDSize:")), 0)


def _sockets() -> int:
    """Sockets of all calls together; without a network namespace, of the machine; very many if nothing tells."""
    try:
        return int(Path("/proc/self/net/sockstat").read_text("ascii").split()[2])
    except OSError:
        return sys.maxsize


def _stat(folder: str) -> list[str]:
    return Path(f"{folder}/stat").read_text("ascii", "replace").rpartition(")")[2].split()


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE
