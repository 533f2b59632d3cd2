"""Heartbeats of trainer ranks: a count of finished pieces of work, and the stacks of a rank that hangs.

A thread of each rank writes its count to a file that the supervisor reads (`launch/hangs.py`). When the supervisor asks
for it, the thread writes the stacks of all threads. If a call into C never returns the interpreter to that thread,
faulthandler's own timer writes them.
"""

import faulthandler
import threading
from contextlib import suppress
from pathlib import Path

DUMP = "dump"
"""File with which the supervisor asks all ranks for their stacks."""
_STUCK_S = 60.0
"""Seconds without the interpreter after which a rank writes its stacks by itself."""
_count = 0


def beat() -> None:
    """Count a piece of work: a micro-batch, a message of a rollout, a tensor, an answer of another rank."""
    global _count  # noqa: PLW0603  (one count per process; any module may add to it)
    _count += 1


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Return the file with the count of a rank."""
    return folder / f"rank_{rank}"


def stack_file(folder: Path, rank: int) -> Path:
    """Return the file for the stacks of a rank."""
    return folder / f"rank_{rank}.stacks"


def interval_s(timeout_s: float) -> float:
    """Return the interval of writing and reading counts that finds a hang of `timeout_s` seconds in time."""
    return min(5.0, timeout_s / 10)


def start_heartbeat(folder: Path, rank: int, timeout_s: float) -> None:
    """Write this rank's heartbeat until the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (folder, rank, interval_s(timeout_s))
    threading.Thread(target=_write, args=arguments, name="heartbeat", daemon=True).start()


def _write(folder: Path, rank: int, every_s: float) -> None:
    written, pause = -1, threading.Event()
    # Opened now: a rank that hangs may have no descriptors left.
    with stack_file(folder, rank).open("w", encoding="utf-8") as stacks:
        while not (folder / DUMP).exists():
            faulthandler.dump_traceback_later(_STUCK_S + every_s, file=stacks)
            if _count != written:
                written = _count
                with suppress(OSError):  # the next write may succeed; the supervisor decides
                    heartbeat_file(folder, rank).write_text(str(written))
            pause.wait(every_s)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback(file=stacks)
