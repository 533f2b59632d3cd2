"""Whether two mathematical answers mean the same, decided within a bounded time from any thread or process.

Most answers are settled by comparing text and numbers, in microseconds. What is left goes to math-verify, which hands
LaTeX to sympy: `9^{9^{9}}` there takes all memory and never returns, and math-verify's own time limit needs the main
thread's signals. So it runs in a worker process that a timer and a memory limit end, and the next question starts
a new one. An answer that cannot be decided counts as wrong.
"""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from decimal import Decimal
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe

MAX_ANSWER_CHARACTERS = 500
"""A longer answer counts as wrong unless it equals the expected text."""
TIMEOUT_S = 5.0
"""Longest time math-verify may take for one pair, in seconds of wall time."""

_START_TIMEOUT_S = 120.0  # importing sympy takes a second, on a loaded machine many
_GRACE_S = 2.0  # the worker ends itself at TIMEOUT_S; only one that could not is killed from here
_INTEGER = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_INVISIBLE = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]|\\?\$")
_LOOSE_SPACE = re.compile(r"(?<!\w) | (?!\w)")

_log = logging.getLogger(__name__)


def math_equal(answer: str, truth: str) -> bool:
    """Whether `answer` is mathematically the same as `truth` (plain text or LaTeX, without the box around it)."""
    given, expected = _canonical(answer), _canonical(truth)
    if given == expected:
        return bool(expected)
    if not given or max(len(given), len(expected)) > MAX_ANSWER_CHARACTERS:
        return False
    if _INTEGER.fullmatch(given) and _INTEGER.fullmatch(expected):
        return int(given) == int(expected)
    if _DECIMAL.fullmatch(given) and _DECIMAL.fullmatch(expected) and Decimal(given) == Decimal(expected):
        return True
    return _verified(given, expected)


def _canonical(text: str) -> str:
    """The text without what never changes its meaning: white space, dollar signs, sizes of brackets and fractions."""
    text = _INVISIBLE.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _LOOSE_SPACE.sub("", " ".join(text.split())).removesuffix(".")
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


@lru_cache(maxsize=8192)  # the trajectories of a group often give the same answer
def _verified(answer: str, truth: str) -> bool:
    return _worker.ask(answer, truth)


class _Worker:
    """A process that answers one question at a time; started when first needed and again whenever it ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = 0

    def ask(self, answer: str, truth: str) -> bool:
        """What math-verify says; False where it takes too long or fails."""
        with self._lock:
            connection = self._connected()
            try:
                connection.send_bytes(json.dumps([answer, truth]).encode())
                if connection.poll(TIMEOUT_S + _GRACE_S):
                    return bool(json.loads(connection.recv_bytes()))
            except (EOFError, OSError):
                pass  # it ended itself: out of time or memory
            _log.warning("math-verify could not decide %.80r against %.80r: counted as wrong", answer, truth)
            self._stop()
            return False

    def _connected(self) -> Connection:
        """The connection to a worker of this very process: one inherited by a fork belongs to the parent."""
        if self._connection is None or self._owner != os.getpid():
            self._start()
        assert self._connection is not None
        return self._connection

    def _start(self) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "arpo_megatron.rewards.verify_worker", str(theirs.fileno()), str(TIMEOUT_S)]
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
            self._stop()
            raise RuntimeError("the math-verify worker did not start: its error is in the log above")

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


_worker = _Worker()
