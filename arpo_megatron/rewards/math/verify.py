"""Whether two mathematical answers are equal, decided within a bounded time from any thread or process.

Comparing text and numbers settles most answers in microseconds (`notation`). The rest goes to math-verify, which hands
LaTeX to sympy: there `9^{9^{9}}` takes all memory and never returns, and math-verify's own time limit needs the main
thread's signals. So it runs in worker processes that end by a timer and a memory limit; the next question starts a new
one.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection, Pipe

from arpo_megatron.rewards.math.notation import canonicalise, compare_without_algebra, is_unambiguous, same_text
from arpo_megatron.rewards.math.units import same_unit, unit_of
from arpo_megatron.utils.processes import REAP_DEADLINE_S

MAX_ANSWER_CHARACTERS = 500
"""A longer answer is wrong unless it equals the expected text."""
TIMEOUT_S = 5.0
"""CPU time limit of math-verify for one pair, in seconds; the limit of wall time is three times as long."""
QUESTION_TIMEOUT_S = 10.0
"""Limit of the wall time that math-verify takes for all answers to one question, in seconds. It bounds the cost of a
group of nonsense. The wait for a worker that others use does not count."""

_WORKERS = max(1, min(4, (os.cpu_count() or 2) // 2))
_START_TIMEOUT_S = 120.0  # importing sympy takes a second, on a loaded machine much longer
_WALL_TIME_FACTOR = 3.0  # the worker ends at its limit of CPU time; this process limits wall time
_CACHED_VERDICTS = 8192  # the trajectories of a group often give the same answer

_log = logging.getLogger(__name__)


class MathVerdict(StrEnum):
    """The result of comparing two answers.

    UNDECIDED: time ran out, or math-verify failed. It counts as wrong, and is counted separately.
    """

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


def math_equal(answer: str, truth: str) -> bool:
    """Whether `answer` is mathematically equal to `truth` (plain text or LaTeX, without the box around it)."""
    return compare(answer, truth) is MathVerdict.EQUAL


def compare_answers(answers: Sequence[str], truths: Sequence[str]) -> list[MathVerdict]:
    """Compare several answers to one question with all right ones.

    Answers without time left within `QUESTION_TIMEOUT_S` are undecided.
    """
    time_left = TimeLeft(QUESTION_TIMEOUT_S)
    return [_best(compare(answer, truth, time_left) for truth in truths) for answer in answers]


def _best(verdicts: Iterable[MathVerdict]) -> MathVerdict:
    """Return EQUAL if one verdict is, else UNDECIDED if one is, else DIFFERENT."""
    found = set[MathVerdict]()
    for verdict in verdicts:
        if verdict is MathVerdict.EQUAL:
            return verdict
        found.add(verdict)
    return MathVerdict.UNDECIDED if MathVerdict.UNDECIDED in found else MathVerdict.DIFFERENT


@dataclass(slots=True)
class TimeLeft:
    """Wall time that workers may still take, in seconds."""

    seconds: float


def compare(answer: str, truth: str, time_left: TimeLeft | None = None) -> MathVerdict:
    """Compare two answers (plain text or LaTeX, without the box around it).

    The time that math-verify takes is subtracted from `time_left`; None: the limit of one pair.
    """
    if max(len(answer), len(truth)) > 10 * MAX_ANSWER_CHARACTERS:  # too long to scan
        return MathVerdict.EQUAL if answer.strip() == truth.strip() else MathVerdict.DIFFERENT
    units = unit_of(answer), unit_of(truth)
    given, expected = canonicalise(answer, units[1]), canonicalise(truth, units[0], expected=True)
    # The original texts too: units are stripped from the expected one more readily, so equal texts may differ here.
    known = same_text(answer, truth) or compare_without_algebra(given, expected)
    if known is not False and max(len(answer), len(truth)) <= MAX_ANSWER_CHARACTERS and not same_unit(*units):
        return MathVerdict.DIFFERENT
    if known is None and max(len(given), len(expected)) <= MAX_ANSWER_CHARACTERS and is_unambiguous(given):
        return _pool.ask(given, expected, time_left or TimeLeft(_WALL_TIME_FACTOR * TIMEOUT_S))
    return MathVerdict.EQUAL if known else MathVerdict.DIFFERENT


class _Pool:
    """Workers, started as needed, with one question each at a time; and a cache of their verdicts."""

    def __init__(self, size: int) -> None:
        self._slots = threading.Semaphore(size)
        self._idle = deque[_Worker]()
        self._verdicts: dict[tuple[str, str], MathVerdict] = {}
        self._lock = threading.Lock()

    def ask(self, answer: str, truth: str, time_left: TimeLeft) -> MathVerdict:
        """Return math-verify's verdict within the time; it is remembered unless the time was short."""
        found = self._verdicts.get((answer, truth))
        if found is None and time_left.seconds > 0:
            with self._slots:
                worker = self._idle.pop() if self._idle else _Worker()
                try:
                    worker.start()
                    begun = time.monotonic()
                    found = worker.ask(answer, truth, time_left.seconds)
                    time_left.seconds -= time.monotonic() - begun
                finally:
                    self._idle.append(worker)
            with self._lock:  # no other thread may add a verdict while the oldest one is looked up
                if found is not None:
                    self._verdicts[answer, truth] = found
                if len(self._verdicts) > _CACHED_VERDICTS:
                    del self._verdicts[next(iter(self._verdicts))]
        return found or MathVerdict.UNDECIDED

    def close(self) -> None:
        """Stop idle workers; a later question starts new ones."""
        while self._idle:
            self._idle.pop().stop()


class _Worker:
    """A process that answers one question at a time; started when first needed, and again whenever it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = 0

    def ask(self, answer: str, truth: str, seconds: float) -> MathVerdict | None:
        """Return math-verify's verdict; None if the time is over before its limit of CPU time."""
        assert self._connection is not None
        cpu_s, found = min(TIMEOUT_S, seconds), None
        try:
            self._connection.send_bytes(json.dumps([answer, truth, cpu_s]).encode())
            if self._connection.poll(min(seconds, _WALL_TIME_FACTOR * cpu_s)):
                return MathVerdict(json.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):  # the worker ended: out of CPU time or memory
            found = MathVerdict.UNDECIDED if cpu_s == TIMEOUT_S else None
        _log.warning("math-verify could not decide %.80r against %.80r: counted as wrong", answer, truth)
        self.stop()
        self.start()  # at the cost of the question that ended the last one
        return found

    def start(self) -> None:
        """Start a process unless this process has one; one inherited by a fork belongs to the parent."""
        if self._connection is not None and self._owner == os.getpid():
            return
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "arpo_megatron.rewards.math.verify_worker", str(theirs.fileno())]
        # With this process's path, because the package need not be installed.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
        theirs.close()
        self._connection, self._owner = ours, os.getpid()
        try:
            ready = ours.poll(_START_TIMEOUT_S) and ours.recv_bytes() == b"ready"
        except EOFError:
            ready = False
        if not ready:
            self.stop()
            raise RuntimeError("the math-verify worker did not start: see its error in the log above")

    def stop(self) -> None:
        """Kill the process and close its connection."""
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(REAP_DEADLINE_S)
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


_pool = _Pool(_WORKERS)
