"""Report a run directory whose file system does not answer, on the launcher's own standard error.

Ranks and services log to files in that directory, so what they report about a hang waits for the same file system.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

INTERVAL_S = 60.0
"""Seconds without an answer until the first line, and between lines."""


@contextmanager
def report_silence(directory: Path, asked: Path, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Inside the block, print one line per interval while the file system does not answer.

    Args:
        directory: named in the lines.
        asked: file in it that is opened again and again. A network file system asks its server at every open, while it
            may answer `stat` from memory. The file need not exist.
        interval_s: seconds until the first line, and between lines.
    """
    ended, answers = threading.Event(), _Answers()
    # Two daemons: the first one hangs with the file system, and the process must end without it.
    threading.Thread(target=_ask, args=(asked, answers, ended, interval_s), name="asks-disk", daemon=True).start()
    threading.Thread(target=_report, args=(directory, answers, ended, interval_s), name="silence", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class _Answers:
    def __init__(self) -> None:
        self.last = time.monotonic()


def _ask(asked: Path, answers: _Answers, ended: threading.Event, interval_s: float) -> None:
    while True:
        with suppress(OSError), asked.open("rb"):  # an error is an answer
            pass
        answers.last = time.monotonic()
        if ended.wait(interval_s / 4):
            return


def _report(directory: Path, answers: _Answers, ended: threading.Event, interval_s: float) -> None:
    while not ended.wait(interval_s):
        silent_s = time.monotonic() - answers.last
        if silent_s >= interval_s:
            sys.stderr.write(f"arpo: {directory} has not answered for {silent_s:.0f} s: check its file system\n")
            sys.stderr.flush()
