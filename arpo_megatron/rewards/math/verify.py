"""Whether two mathematical answers mean the same, decided within a bounded time from any thread or process.

Most answers are settled by comparing text and numbers, in microseconds (`notation`). What is left goes to math-verify,
which hands LaTeX to sympy: `9^{9^{9}}` there takes all memory and never returns, and math-verify's own time limit needs
the main thread's signals. So it runs in worker processes that a timer and a memory limit end, and the next question
starts a new one.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection, Pipe

from arpo_megatron.rewards.math.notation import canonical, certain, same_text, settled
from arpo_megatron.rewards.math.units import same_unit, unit_of

MAX_ANSWER_CHARACTERS = 500
"""A longer answer is different unless it is the expected text."""
TIMEOUT_S = 5.0
"""Most CPU time that math-verify may take for one pair, in seconds; of wall time three times as much."""
QUESTION_TIMEOUT_S = 10.0
"""Wall time that math-verify may take for all answers to one question, in seconds: a group of nonsense costs no more.
What a question waits for a worker that others have does not count."""

_WORKERS = max(1, min(4, (os.cpu_count() or 2) // 2))
_START_TIMEOUT_S = 120.0  # importing sympy takes a second, on a loaded machine many
_PATIENCE = 3.0  # the worker ends itself at its limit of CPU time; wall time is looked after from here
_KEPT = 8192  # verdicts: the trajectories of a group often give the same answer

_log = logging.getLogger(__name__)


class MathVerdict(StrEnum):
    """What is known of two answers.

    UNDECIDED: there was no time, or math-verify failed. That counts as wrong, and is counted.
    """

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


def math_equal(answer: str, truth: str) -> bool:
    """Whether `answer` is mathematically the same as `truth` (plain text or LaTeX, without the box around it)."""
    return verdict(answer, truth) is MathVerdict.EQUAL


def verdicts(answers: Sequence[str], truth: str) -> list[MathVerdict]:
    """Of several answers to one question; those for which `QUESTION_TIMEOUT_S` leaves no time are undecided."""
    time_left = TimeLeft(QUESTION_TIMEOUT_S)
    return [verdict(answer, truth, time_left) for answer in answers]


@dataclass(slots=True)
class TimeLeft:
    """Wall time that a worker may still take, in seconds."""

    seconds: float


def verdict(answer: str, truth: str, time_left: TimeLeft | None = None) -> MathVerdict:
    """Compare two answers (plain text or LaTeX, without the box around it) in the time left; None: that for one pair.

    What math-verify takes is taken from it.
    """
    if max(len(answer), len(truth)) > 10 * MAX_ANSWER_CHARACTERS:  # not even scanned
        return MathVerdict.EQUAL if answer.strip() == truth.strip() else MathVerdict.DIFFERENT
    units = unit_of(answer), unit_of(truth)
    given, expected = canonical(answer, units[1]), canonical(truth, units[0], expected=True)
    # As they are written too: of the expected one a unit is taken away more readily, so one text may have two forms.
    known = same_text(answer, truth) or settled(given, expected)
    if known is not False and max(len(answer), len(truth)) <= MAX_ANSWER_CHARACTERS and not same_unit(*units):
        return MathVerdict.DIFFERENT
    if known is None and max(len(given), len(expected)) <= MAX_ANSWER_CHARACTERS and certain(given):
        return _pool.ask(given, expected, time_left or TimeLeft(_PATIENCE * TIMEOUT_S))
    return MathVerdict.EQUAL if known else MathVerdict.DIFFERENT


class _Pool:
    """Workers, started as they are needed, one question each at a time; and what they have said."""

    def __init__(self, size: int) -> None:
        self._places = threading.Semaphore(size)
        self._idle = deque[_Worker]()
        self._known: dict[tuple[str, str], MathVerdict] = {}

    def ask(self, answer: str, truth: str, time_left: TimeLeft) -> MathVerdict:
        """What math-verify says within the time; a verdict is remembered unless the time was short."""
        found = self._known.get((answer, truth))
        if found is None and time_left.seconds > 0:
            with self._places:
                worker = self._idle.pop() if self._idle else _Worker()
                try:
                    worker.start()
                    begun = time.monotonic()
                    found = worker.ask(answer, truth, time_left.seconds)
                    time_left.seconds -= time.monotonic() - begun
                finally:
                    self._idle.append(worker)
            if found is not None:
                self._known[answer, truth] = found
            if len(self._known) > _KEPT:
                self._known.pop(next(iter(self._known)), None)
        return found or MathVerdict.UNDECIDED

    def close(self) -> None:
        """End the workers that are idle; a later question starts new ones."""
        while self._idle:
            self._idle.pop().stop()


class _Worker:
    """A process that answers one question at a time; started when first needed and again whenever it ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = 0

    def ask(self, answer: str, truth: str, seconds: float) -> MathVerdict | None:
        """What math-verify says; None where the time is over before its limit of CPU time is."""
        assert self._connection is not None
        cpu_s, found = min(TIMEOUT_S, seconds), None
        try:
            self._connection.send_bytes(json.dumps([answer, truth, cpu_s]).encode())
            if self._connection.poll(min(seconds, _PATIENCE * cpu_s)):
                return MathVerdict(json.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):  # it ended itself: out of CPU time or memory
            found = MathVerdict.UNDECIDED if cpu_s == TIMEOUT_S else None
        _log.warning("math-verify could not decide %.80r against %.80r: counted as wrong", answer, truth)
        self.stop()
        self.start()  # in the time of the question that has ended the last one
        return found

    def start(self) -> None:
        """Have a process of this very process: one inherited by a fork belongs to the parent."""
        if self._connection is not None and self._owner == os.getpid():
            return
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "arpo_megatron.rewards.math.verify_worker", str(theirs.fileno())]
        # The path as this process sees it: the package need not be installed, nor the working directory be the same.
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
            raise RuntimeError("the math-verify worker did not start: its error is in the log above")

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


_pool = _Pool(_WORKERS)
