"""What a call uses, seen from outside, where the kernel does not bound it for the call as a whole.

A process's limits (RLIMIT_*) are the kernel's; sums over a call's processes are the kernel's with control groups only.
Elsewhere the supervisor looks every `PERIOD_S` seconds, and ends a call that is over its bounds.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

PERIOD_S = 0.05
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_FLAGS, _UTIME, _STIME, _CUTIME, _CSTIME, _RSS = 6, 11, 12, 13, 14, 21  # fields of /proc/PID/stat after the name
_NEVER_EXECUTED = 0x40
"""PF_FORKNOEXEC: the process came about by a fork and has not executed a program since."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all processes of a call together."""

    processes: int
    memory_bytes: int
    """Resident, without what each shares with the zygote."""
    cpu_s: float
    """Also of processes that have ended."""


class Watchdog:
    """Looks at a process and its descendants again and again."""

    def __init__(self, first_pid: int, shared_bytes: int) -> None:
        """shared_bytes: resident size of the first process when it was forked."""
        self._first_pid, self._shared_bytes = first_pid, shared_bytes
        self._seen_s = self._lost_s = 0.0

    def look(self) -> Usage:
        """Usage now.

        The kernel adds the time of a process that has ended to its parent's only if the parent waits for it; else it
        is gone, and the sum over the living falls. What it fell by counts as used.
        """
        usage = _look(self._first_pid, self._shared_bytes)
        for _ in range(2):
            if usage.cpu_s >= self._seen_s:
                break
            # A process may have ended between the look at its parent and the one at itself.
            usage = max(usage, _look(self._first_pid, self._shared_bytes), key=lambda each: each.cpu_s)
        self._lost_s += max(0.0, self._seen_s - usage.cpu_s)
        self._seen_s = usage.cpu_s
        return replace(usage, cpu_s=usage.cpu_s + self._lost_s)


def _look(first_pid: int, shared_bytes: int) -> Usage:
    processes = memory = ticks = 0
    waiting = [(first_pid, True)]
    while waiting:
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
    return Usage(processes, memory, ticks / _TICKS_A_SECOND)


def _stat(folder: str) -> list[str]:
    return Path(f"{folder}/stat").read_text("ascii", "replace").rpartition(")")[2].split()


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE
