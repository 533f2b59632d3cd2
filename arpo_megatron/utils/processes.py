"""Process groups: how they are ended, what their logs say, and how they die with the process that started them."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools_sandbox.utils import linux

PARENT_WATCH_INTERVAL_S = 0.5
_TAIL_BYTES, _LINE_CHARS = 2**22, 2000
RANK_FAILED = "---- rank {rank} failed:"
"""First line of a failing trainer rank's report in its log (`rank_main.py`)."""
RANK_FAILED_END = "---- end of that rank's report"
_LIBRARY_WARNING = re.compile(r"\S*site-packages/\S+:\d+: \w*Warning: ")
GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
REAP_DEADLINE_S = 4.0
"""Longest time that a killed group may take to disappear."""
STORE_FILE = "ARPO_STORE_FILE"
"""Environment variable of the ranks on one machine: the file through which they find each other, in a directory that
only this user may enter."""


class ProcessDiedError(Exception):
    """A process of the job ended with an error. The message names it, how it ended, and its log with the last lines.

    `code` is the exit code as a shell reports it (`exit_code`), 1 for a process that was killed as hung.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def stop_groups(processes: Sequence[subprocess.Popen[Any]], grace_s: float = GRACE_S) -> list[int]:
    """End whole process groups: SIGTERM, up to `grace_s` seconds for all of them (0: no SIGTERM), then SIGKILL.

    Returns:
        Ids of the groups with a member that the kernel has not ended after REAP_DEADLINE_S: it waits for a device or a
        filesystem.
    """
    if grace_s:
        for process in processes:
            _signal_group(process.pid, signal.SIGTERM)
        _wait_for_end(processes, grace_s)
    for process in processes:
        _signal_group(process.pid, signal.SIGKILL)
    _wait_for_end(processes, REAP_DEADLINE_S)
    return [process.pid for process in processes if _group_alive(process)]


def die_with_parent() -> None:
    """Ask the kernel to kill the calling process when the thread that started it ends (Linux prctl(2))."""
    linux.die_with_parent(signal.SIGKILL)


def bind_to_parent(parent_pid: int) -> None:
    """Do `die_with_parent` in a child of `parent_pid`; end the child now if that process has ended already."""
    die_with_parent()
    if os.getppid() != parent_pid:
        os._exit(1)


def watch_parent(parent_pid: int, on_death: Callable[[], None]) -> None:
    """Call `on_death` from a thread as soon as this process is no longer a child of `parent_pid`.

    For a process whose parent starts it from another thread than its main one: `die_with_parent` would kill it when
    that thread ends.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_WATCH_INTERVAL_S)
        on_death()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def raise_file_limit() -> None:
    """Let this process open as many files and connections as the system allows (its hard limit)."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


def exit_code(code: int) -> int:
    """Return the exit code of a failure as a shell reports it: 128 + n for signal n, 1 for a premature success."""
    return 128 - code if code < 0 else code or 1


def how_it_ended(code: int) -> str:
    """Return a phrase for a process's return code (`Popen.returncode`)."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def last_lines(path: Path, start: int = 0, count: int = 15) -> str:
    """Return the end of a log, without the bytes before `start`, indented for an error message; "" if there is none.

    Warnings of libraries are left out: they would hide the cause.
    """
    kept: list[str] = []
    warned = False
    for line in _tail(path, start):
        if _LIBRARY_WARNING.match(line):
            warned = True
        elif warned and line.startswith("  "):  # the line of code that warned
            warned = False
        else:
            kept.append(f"  | {line.rstrip()[:_LINE_CHARS]}")
            warned = False
    return "\n".join(kept[-count:])


_TASK_KILLED = re.compile(r"srun: error: \S+ tasks? [\d,-]+: (?!Exited)")
"""srun's line about a task that a signal has ended."""


def first_failure(path: Path, start: int = 0, limit: int = 40) -> str:
    """Return the report of the first failing rank in a log after byte `start`, its last `limit` lines; "" if none.

    A killed rank reports nothing, and its peers fail after it. So srun's line about such a task comes first.
    """
    lines = _tail(path, start)
    opening = RANK_FAILED.partition("{")[0]
    first = next((number for number, line in enumerate(lines) if line.startswith(opening)), None)
    if first is None:
        return ""
    report = lines[first : next((n for n in range(first, len(lines)) if lines[n] == RANK_FAILED_END), len(lines))]
    shown = report if len(report) <= limit else [report[0], "...", *report[2 - limit :]]
    killed = [line for line in lines[:first] if _TASK_KILLED.match(line)]
    return "\n".join(f"  | {line}" for line in [*killed[:1], *shown])


def _tail(path: Path, start: int) -> list[str]:
    """Return the lines at the end of a log after byte `start`. A log can be larger than the memory."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read(_TAIL_BYTES).decode(errors="replace").splitlines()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _wait_for_end(processes: Sequence[subprocess.Popen[Any]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(_group_alive(process) for process in processes):
        time.sleep(0.02)


def _group_alive(process: subprocess.Popen[Any]) -> bool:
    process.poll()  # reap the group's first process, or its zombie would keep the group alive
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
