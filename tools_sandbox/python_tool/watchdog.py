"""What a call uses, seen from outside, where the kernel does not bound it for the call as a whole.

A process's limits (RLIMIT_*) are the kernel's; sums over a call's processes are the kernel's with control groups only.
Elsewhere the supervisor looks every `PERIOD_S` seconds, and ends a call that is over its bounds.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PERIOD_S = 0.05
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_UTIME, _STIME, _CUTIME, _CSTIME, _RSS = 11, 12, 13, 14, 21  # fields of /proc/PID/stat after the name


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all processes of a call together."""

    processes: int
    memory_bytes: int
    """Resident, without what each shares with the zygote."""
    cpu_s: float
    """Also of processes that have ended and been waited for."""


def look(first_pid: int, shared_bytes: int) -> Usage:
    """Usage of a process and its descendants. shared_bytes: resident size of a process that has just been forked."""
    processes = memory = 0
    ticks = 0
    waiting = [first_pid]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError, ValueError):  # it has ended meanwhile
            fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
            processes += 1
            ticks += sum(int(fields[kind]) for kind in (_UTIME, _STIME, _CUTIME, _CSTIME))
            memory += max(0, int(fields[_RSS]) * _PAGE - shared_bytes)
            for thread in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (thread / "children").read_text("ascii").split())
    return Usage(processes, memory, ticks / _TICKS_A_SECOND)


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE
