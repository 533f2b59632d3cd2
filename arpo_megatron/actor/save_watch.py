"""Report a save that takes long.

A write to a file server that is gone neither fails nor ends, and every rank then waits for it without a message.
"""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from arpo_megatron.actor import parallel

INTERVAL_S = 60.0
"""Seconds of a save between two lines about it."""
_NAMED = 8
"""Ranks that a line names."""


class SaveWatch:
    """Logs one line per interval while a save lasts, in a thread of rank 0. All ranks create it for each save.

    Args:
        directory: where the save writes.
        log: takes a line. The line goes to standard error first, since the log may wait for the same file system. If
            standard error does so too, the launcher reports the file system (`launch/silent_directory.py`).
        interval_s: seconds until the first line, and between lines.
    """

    _saves = 0

    def __init__(self, directory: Path, log: Callable[[str], None], interval_s: float) -> None:
        SaveWatch._saves += 1  # equal on all ranks
        self._name = f"save {SaveWatch._saves}"
        self._directory, self._log, self._interval_s = directory, log, interval_s
        self._started, self._ended = time.monotonic(), threading.Event()
        if parallel.is_rank_zero():
            threading.Thread(target=self._watch, name=self._name, daemon=True).start()

    def rank_has_written(self) -> None:
        """Record that this rank has written its part."""
        parallel.post(self._name)

    def end(self) -> None:
        """Stop the lines: the save has succeeded or failed."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            missing = parallel.ranks_without(self._name) or [0]  # rank 0 commits what all ranks have written
            line = (
                f"{self._directory} is not written after {time.monotonic() - self._started:.0f} s: "
                f"waiting for rank {_listed(missing)}; check this file system"
            )
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
            self._log(line)


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(map(str, ranks[:_NAMED])) + more
