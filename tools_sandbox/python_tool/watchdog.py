"""The watchdog: it measures what a call uses, for bounds on the whole call that the kernel does not enforce.

The kernel limits each process (RLIMIT_*). It limits the sum over a call's processes only with control groups. Without
them, the supervisor looks every `PERIOD_S` seconds and ends a call that exceeds its bounds.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

PERIOD_S = 0.05
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_UTIME, _STIME, _CUTIME, _CSTIME = 11, 12, 13, 14  # fields of /proc/PID/stat after the name
_MAPPING_BYTES, _FORKED_MAPPING_BYTES = 256, 170
"""Memory of the kernel for one mapping, which is at least one page of address space, and for each fork that led to it
(its `anon_vma` and `anon_vma_chain`)."""
_REST = 9
"""An exact measurement of memory is followed by a rest of this many times its CPU time."""
_LOST = 3
"""Exact measurements that end without a result, one after the other, until the upper bound counts instead."""
_STATUS = re.compile(rb"^(RssAnon|RssShmem|VmSwap|VmPTE|VmSize):\s*(\d+) kB", re.MULTILINE)
_ROLLUP = re.compile(rb"^(?:Pss_Anon|Pss_Shmem|SwapPss):\s*(\d+) kB", re.MULTILINE)
_MOST_MAPPINGS = int(Path("/proc/sys/vm/max_map_count").read_text())
"""Limit of the mappings of one process."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of all processes of a call together."""

    processes: int
    memory_bytes: int
    """Memory beyond what is preloaded: see `Watchdog`. Below the limit it is a rough figure."""
    cpu_s: float
    """CPU time, including processes that have ended."""


class _Process(NamedTuple):
    pid: int
    folder: Path
    """Folder in /proc of a thread that has the memory."""
    page_tables_bytes: int
    mapping_bytes: int
    """Memory of the kernel for each of its mappings."""
    most_bytes: int
    """Upper bound on its memory, which is fast to read: shared pages count whole, and each page of the address space
    counts as a mapping, up to the most that Linux allows."""


class _Measurement:
    """An exact measurement in a process of its own, since it waits for locks that the call holds while it forks.

    It is no thread: a process whose children have another PID namespace cannot start one.
    """

    def __init__(self, processes: list[_Process], most_bytes: int, enough_bytes: int) -> None:
        """Raises OSError if no process can be started.

        most_bytes: upper bound on the memory of the processes.
        enough_bytes: if their pages have more, page tables and mappings are left out: the call ends anyway, and sooner.
        """
        self.most_bytes = most_bytes
        self._pipe, writing = os.pipe()
        os.set_blocking(self._pipe, False)
        try:
            self._pid = os.fork()
        except OSError:
            os.close(self._pipe)
            raise
        else:
            if self._pid == 0:
                _report(processes, enough_bytes, writing)
        finally:
            os.close(writing)

    def result(self) -> tuple[int, float] | None:
        """Return bytes and seconds of CPU time; None: not yet. Raises ValueError if it ended without a result."""
        try:
            report = os.read(self._pipe, 100).decode()
        except BlockingIOError:
            return None
        os.close(self._pipe)
        os.waitpid(self._pid, 0)
        exact, cpu_s = report.split()
        return int(exact), float(cpu_s)


def _report(processes: list[_Process], enough_bytes: int, descriptor: int) -> NoReturn:
    try:
        # The smaller one of two: a fork between the looks at two processes, or a child that borrows its parent's memory
        # until it executes a program, makes one of them too large.
        exact = min(sum(map(_page_bytes, processes)) for _ in range(2))
        if exact <= enough_bytes:
            exact += sum(map(_kernel_bytes, processes))
        os.write(descriptor, f"{exact} {time.process_time()}".encode())
    finally:
        os._exit(0)


class Watchdog:
    """A repeated measurement of a process and its descendants.

    The memory of a call is that of its pages that belong to no file (a page that n processes share counts 1/n for each
    of them), swap, page tables and mappings, less the preloaded pages, which are shared with the zygote. The exact
    figure takes the kernel two passes of some 14 ms per GiB each, so it is only measured when an upper bound exceeds
    the limit. If the memory may have grown beyond it, the processes are stopped meanwhile: they could otherwise take
    memory, and the CPU that the measurement needs.
    """

    def __init__(self, first_pid: int, preloaded_bytes: int, memory_limit_bytes: int | None) -> None:
        """preloaded_bytes: see `preloaded_bytes`. memory_limit_bytes: None if memory need not be measured."""
        self._first_pid, self._preloaded_bytes, self._limit_bytes = first_pid, preloaded_bytes, memory_limit_bytes
        self._seen_s = self._lost_s = 0.0
        self._measurement: _Measurement | None = None
        self._lost = self._last_bytes = self._last_most_bytes = 0
        self._rest_until = 0.0
        self._stopped = set[int]()

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
        waiting = [(self._first_pid, 0)]
        while waiting and count <= at_most:  # a fork bomb may grow faster than this loop
            pid, forks = waiting.pop()
            with suppress(OSError, ValueError):  # it has ended meanwhile
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
                count += 1
                ticks += sum(int(fields[kind]) for kind in (_UTIME, _STIME, _CUTIME, _CSTIME))
                threads = list(Path(f"/proc/{pid}/task").iterdir())
                for thread in threads:
                    waiting += [(int(child), forks + 1) for child in _read_or_nothing(thread / "children").split()]
                if self._limit_bytes is not None and (process := _find_memory(pid, threads, forks)):
                    processes.append(process)
                    if self._stopped and fields[0] != b"T":  # it was created meanwhile
                        self._stop(pid)
        return Usage(count, self._memory_bytes(processes), ticks / _TICKS_A_SECOND)

    def _memory_bytes(self, processes: list[_Process]) -> int:
        most = sum(process.most_bytes for process in processes) - self._preloaded_bytes
        if self._limit_bytes is None:
            return most
        self._take_result()
        if most <= self._limit_bytes:  # also if a process has ended since it made the bound too large
            self.release()
            return most
        may_exceed = self._last_bytes + max(0, most - self._last_most_bytes) > self._limit_bytes
        if self._measurement is None and (may_exceed or time.monotonic() >= self._rest_until):
            with suppress(OSError):  # the user has no process left; tried again at the next look
                enough = self._limit_bytes + self._preloaded_bytes
                self._measurement = _Measurement(processes, most, enough)
                if may_exceed:
                    for process in processes:
                        self._stop(process.pid)
        return self._last_bytes

    def _stop(self, pid: int) -> None:
        with suppress(OSError):
            if b"\nState:\tT" not in Path(f"/proc/{pid}/status").read_bytes():  # the code itself may have stopped it
                os.kill(pid, signal.SIGSTOP)
                self._stopped.add(pid)

    def release(self) -> None:
        """Continue the processes that are stopped for a measurement."""
        for pid in self._stopped:
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def _take_result(self) -> None:
        measurement = self._measurement
        if measurement is None:
            return
        try:
            result = measurement.result()
        except ValueError:  # perhaps the call has ended it
            self._lost += 1
            result = (measurement.most_bytes + self._preloaded_bytes, 0.0) if self._lost >= _LOST else None
            self._measurement = None
            self.release()
        if result is not None:
            self._last_bytes, self._last_most_bytes = result[0] - self._preloaded_bytes, measurement.most_bytes
            self._rest_until = time.monotonic() + _REST * result[1]
            self._measurement, self._lost = None, 0
            if self._limit_bytes is None or self._last_bytes <= self._limit_bytes:  # else the call ends
                self.release()


def preloaded_bytes() -> int:
    """Return the memory of this process that a call inherits and shares with the zygote."""
    process = _status(Path("/proc/self"))
    return process.get(b"RssAnon", 0) + process.get(b"RssShmem", 0)


def _find_memory(pid: int, threads: list[Path], forks: int) -> _Process | None:
    """Return the process of some threads, `forks` forks below the first process of the call.

    Threads that have ended, even the first, have no memory; None if all have.
    """
    mapping_bytes = _MAPPING_BYTES + forks * _FORKED_MAPPING_BYTES
    for thread in threads:
        if status := _status(thread):
            pages = status.pop(b"VmSize") // _PAGE
            most = sum(status.values()) + min(pages, _MOST_MAPPINGS) * mapping_bytes
            return _Process(pid, thread, status.get(b"VmPTE", 0), mapping_bytes, most)
    return None


def _page_bytes(process: _Process) -> int:
    try:
        return sum(int(size) for size in _ROLLUP.findall((process.folder / "smaps_rollup").read_bytes())) * 1024
    except PermissionError:  # it executes a program that may not be read
        return process.most_bytes
    except OSError:  # it has ended meanwhile
        return 0


def _kernel_bytes(process: _Process) -> int:
    """Return the memory of the kernel for page tables and mappings; 0 if it has ended, or may not be read."""
    with suppress(OSError):
        mappings = (process.folder / "maps").read_bytes().count(b"\n")
        return process.page_tables_bytes + mappings * process.mapping_bytes
    return 0


def _status(folder: Path) -> dict[bytes, int]:
    """Return sizes in bytes; none for a process or thread that has ended."""
    return {name: int(size) * 1024 for name, size in _STATUS.findall(_read_or_nothing(folder / "status"))}


def _read_or_nothing(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""
