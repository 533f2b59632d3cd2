"""The roles of a job on one machine: processes that start together, log to files, and end together.

Every role leads a session of its own, so that ctrl-C reaches the command line alone and the command line ends the
roles in order. A role also dies when the command line is killed (the kernel signals it), so nothing is ever left over.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from arpo_megatron.utils.signals import interrupts_deferred, interrupts_ignored

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
PARENT_WATCH_INTERVAL_S = 0.5
RANK_FAILED = "---- rank {rank} failed:"
"""Begins, on a line of its own, what a failing trainer rank writes to its log (`ranks.py`)."""
RANK_FAILED_END = "---- end of that rank's report"
GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
REAP_DEADLINE_S = 4.0


class ProcessDiedError(Exception):
    """A role ended with an error; the message names the role, its exit and its log with the last lines of it.

    `code` is the exit code of the role as a shell tells it (`exit_code`), 1 where it was ended for what it did.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class ManagedProcess:
    """One running process group, the file that its output goes to, and where in that file it begins, in bytes.

    `started` is in seconds since the epoch.
    """

    name: str
    process: subprocess.Popen[Any]
    log: Path
    log_start: int = 0
    started: float = field(default_factory=time.time)

    def failure(self) -> str:
        """What to tell the user when this role ended by itself."""
        report = first_failure(self.log, self.log_start) or last_lines(self.log)
        return f"{self.name} {how_it_ended(self.process.returncode)}; log: {self.log}\n{report}"


@dataclass(slots=True)
class ManagedProcesses:
    """Starts roles and ends all of them on leaving the `with` block, whatever happened inside.

    `checks` are called while a role is waited for; one that raises ends the wait.
    """

    log_dir: Path
    running: list[ManagedProcess] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> ManagedProcess:
        """Start `command` in a session of its own, appending its output to `<log_dir>/<name>.log`."""
        log = self.log_dir / f"{name}.log"
        log_start = log.stat().st_size if log.exists() else 0
        with interrupts_deferred(), log.open("a", encoding="utf-8") as sink:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  (one prctl call, safe between fork and exec)
                text=True,
            )
            role = ManagedProcess(name, process, log, log_start)
            self.running.append(role)
        return role

    def wait(self, role: ManagedProcess, *, poll: Callable[[], None] = lambda: None, every_s: float = 0.1) -> None:
        """Wait until `role` ends well, calling `poll` meanwhile.

        Raises:
            ProcessDiedError: any role, this one included, ended with an error, or another ended at all, or one of the
                `checks` says so.
        """
        while True:
            poll()
            self.check()
            for each in self.running:
                code = each.process.poll()
                if code is not None and (code != 0 or each is not role):
                    raise ProcessDiedError(each.failure(), exit_code(code))
            if role.process.poll() is not None:
                self.running.remove(role)
                poll()
                return
            time.sleep(every_s)

    def check(self) -> None:
        """Call the `checks`, whatever is waited for. Raises ProcessDiedError where one says so."""
        for check in self.checks:
            check()

    def stop(self) -> None:
        """SIGTERM to every role's group, SIGKILL after GRACE_S. A ctrl-C meanwhile does not interrupt it."""
        with interrupts_ignored():
            stop_groups([role.process for role in self.running])
        self.running.clear()


def stop_groups(processes: Sequence[subprocess.Popen[Any]], grace_s: float = GRACE_S) -> None:
    """End whole process groups: TERM, up to `grace_s` seconds together (0: no TERM), then KILL.

    The leaders are reaped, and no member is left (unless the kernel takes longer than REAP_DEADLINE_S).
    """
    if grace_s:
        for process in processes:
            _signal_group(process.pid, signal.SIGTERM)
        _wait_for_end(processes, grace_s)
    for process in processes:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
    _wait_for_end(processes, REAP_DEADLINE_S)


JOB_PID = "ARPO_JOB_PID"
"""Environment variable of a rank: the process of the job that started torchrun on this machine."""


def die_with_parent() -> None:
    """Ask the kernel to kill the calling process when the thread that started it ends (Linux prctl(2))."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def watch_parent(parent_pid: int, on_death: Callable[[], None]) -> None:
    """Call `on_death` from a thread as soon as this process is no longer a child of `parent_pid`.

    For a process that is started from another thread than its parent's main one: `die_with_parent` would fire when
    that thread ends.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_WATCH_INTERVAL_S)
        on_death()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def exit_code(code: int) -> int:
    """That of a failure, from a process's return code: 128 + n for signal n; 1 where a process ended well too early."""
    return 128 - code if code < 0 else code or 1


def how_it_ended(code: int) -> str:
    """A process's return code (`Popen.returncode`) in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def last_lines(path: Path, count: int = 15) -> str:
    """The end of a log, for an error message; empty when there is none."""
    if not path.exists():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return "".join(f"  | {line.rstrip()}\n" for line in deque(file, count)).rstrip("\n")


def first_failure(path: Path, start: int = 0, limit: int = 40) -> str:
    """What the first failing rank wrote to a log after byte `start`, its last `limit` lines; empty where none did."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    opening = RANK_FAILED.partition("{")[0]
    first = next((number for number, line in enumerate(lines) if line.startswith(opening)), None)
    if first is None:
        return ""
    report = lines[first : next((n for n in range(first, len(lines)) if lines[n] == RANK_FAILED_END), len(lines))]
    shown = report if len(report) <= limit else [report[0], "...", *report[2 - limit :]]
    return "\n".join(f"  | {line}" for line in shown)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _wait_for_end(processes: Sequence[subprocess.Popen[Any]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(_group_alive(process) for process in processes):
        time.sleep(0.02)


def _group_alive(process: subprocess.Popen[Any]) -> bool:
    process.poll()  # reap the leader, or its zombie would keep the group alive
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
