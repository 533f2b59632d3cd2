"""The watchdog: it measures what a call uses, for bounds on the whole call that the kernel does not enforce.

The kernel limits each process (RLIMIT_*). It limits the sum over a call's processes only with control groups. Without
them, the supervisor looks every `PERIOD_S` seconds and ends a call that exceeds its bounds.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

PERIOD_S = 0.05
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_UTIME, _STIME, _CUTIME, _CSTIME = 11, 12, 13, 14  # fields of /proc/PID/stat after the name
_MAPPING_BYTES = 256
"""Memory of the kernel for one mapping, which is at least one page of address space."""
_REST = 9
"""An exact measurement of memory is followed by a rest of this many times its duration."""
_STATUS = re.compile(rb"^(RssAnon|RssShmem|VmSwap|VmPTE|VmSize):\s*(\d+) kB", re.MULTILINE)
_ROLLUP = re.compile(rb"^(?:Pss_Anon|Pss_Shmem|SwapPss):\s*(\d+) kB", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of all processes of a call together."""

    processes: int
    memory_bytes: int
    """Memory beyond what is preloaded: see `Watchdog`. It may be an upper bound that is within the limit."""
    cpu_s: float
    """CPU time, including processes that have ended."""


class _Process(NamedTuple):
    folder: Path
    """Folder in /proc of a thread that has the memory."""
    page_tables_bytes: int
    most_bytes: int
    """Upper bound on its memory, which is fast to read. Counts shared pages whole, and a mapping for each page of the
    address space."""


class Watchdog:
    """A repeated measurement of a process and its descendants.

    The memory of a call is that of its pages that belong to no file (a page that n processes share counts 1/n for each
    of them), swap, page tables and mappings, less the preloaded pages, which are shared with the zygote. The exact
    figure takes the kernel some 60 ms per GiB, so it is only measured when an upper bound exceeds the limit.
    """

    def __init__(self, first_pid: int, preloaded_bytes: int, memory_limit_bytes: int | None) -> None:
        """preloaded_bytes: see `preloaded_bytes`. memory_limit_bytes: None if memory need not be measured."""
        self._first_pid, self._preloaded_bytes, self._limit_bytes = first_pid, preloaded_bytes, memory_limit_bytes
        self._seen_s = self._lost_s = 0.0
        self._rest_until = 0.0
        self._last_exact_bytes = self._last_most_bytes = 0

    def look(self, at_most: int) -> Usage:
        """Return the usage now. Processes beyond `at_most` are left out.

        When a process ends, the kernel adds its time to its parent only if the parent waits for it. Otherwise the time
        is lost and the sum over the living falls. The amount by which it falls counts as used.
        """
        usage = self._look(at_most)
        for _ in range(2):
            if usage.cpu_s >= self._seen_s:
                break
            # A process may have ended between the look at its parent and the look at itself.
            usage = max(usage, self._look(at_most), key=lambda each: each.cpu_s)
        self._lost_s += max(0.0, self._seen_s - usage.cpu_s)
        self._seen_s = usage.cpu_s
        return replace(usage, cpu_s=usage.cpu_s + self._lost_s)

    def _look(self, at_most: int) -> Usage:
        ticks, count = 0, 0
        processes = list[_Process]()
        waiting = [self._first_pid]
        while waiting and count <= at_most:  # a fork bomb may grow faster than this loop
            pid = waiting.pop()
            with suppress(OSError, ValueError):  # it has ended meanwhile
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
                count += 1
                ticks += sum(int(fields[kind]) for kind in (_UTIME, _STIME, _CUTIME, _CSTIME))
                threads = list(Path(f"/proc/{pid}/task").iterdir())
                for thread in threads:
                    waiting += [int(child) for child in _read_or_nothing(thread / "children").split()]
                if self._limit_bytes is not None and (process := _find_memory(threads)):
                    processes.append(process)
        return Usage(count, self._memory_bytes(processes), ticks / _TICKS_A_SECOND)

    def _memory_bytes(self, processes: list[_Process]) -> int:
        most = sum(process.most_bytes for process in processes) - self._preloaded_bytes
        if self._limit_bytes is None or most <= self._limit_bytes:
            return most
        grown = self._last_exact_bytes + max(0, most - self._last_most_bytes)
        began = time.monotonic()
        if grown <= self._limit_bytes and began < self._rest_until:
            return grown
        exact = self._measure(processes)
        if exact > self._limit_bytes:
            # A fork between the looks at two processes, or a child that borrows its parent's memory until it executes a
            # program, makes one measurement too large.
            exact = min(exact, self._measure(processes))
        self._last_exact_bytes, self._last_most_bytes = exact, most
        now = time.monotonic()
        self._rest_until = now + _REST * (now - began)
        return exact

    def _measure(self, processes: list[_Process]) -> int:
        return sum(map(_exact_bytes, processes)) - self._preloaded_bytes


def preloaded_bytes() -> int:
    """Return the memory of this process that a call inherits and shares with the zygote."""
    process = _status(Path("/proc/self"))
    return process.get(b"RssAnon", 0) + process.get(b"RssShmem", 0)


def _find_memory(threads: list[Path]) -> _Process | None:
    """Return the process of some threads. Threads that have ended, even the first, have no memory; None if all have."""
    for thread in threads:
        if status := _status(thread):
            size = status.pop(b"VmSize")
            most = sum(status.values()) + size // _PAGE * _MAPPING_BYTES
            return _Process(thread, status.get(b"VmPTE", 0), most)
    return None


def _exact_bytes(process: _Process) -> int:
    try:
        pages = sum(int(size) for size in _ROLLUP.findall((process.folder / "smaps_rollup").read_bytes())) * 1024
        mappings = (process.folder / "maps").read_bytes().count(b"\n")
        return pages + process.page_tables_bytes + mappings * _MAPPING_BYTES
    except PermissionError:  # it executes a program that may not be read
        return process.most_bytes
    except OSError:  # it has ended meanwhile
        return 0


def _status(folder: Path) -> dict[bytes, int]:
    """Return sizes in bytes; none for a process or thread that has ended."""
    return {name: int(size) * 1024 for name, size in _STATUS.findall(_read_or_nothing(folder / "status"))}


def _read_or_nothing(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""
