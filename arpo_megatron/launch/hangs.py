"""Find trainer ranks that hang: no rank finishes a piece of work for `parallel.collective_timeout_s` seconds.

Ranks wait for each other in every step, so one that hangs soon stops all of them, in a collective or in the controller.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.utils.heartbeat import DUMP, heartbeat_file, interval_s, stack_file
from arpo_megatron.utils.processes import ProcessDiedError

WROTE_NONE = "wrote no stacks"
"""Words of the error after the ranks that did not answer: their processes are stopped, or their nodes are lost."""
_ANSWER_S = 10.0
"""Time for writing stacks on a slow filesystem, in addition to the interval."""


class HangError(ProcessDiedError):
    """No trainer rank makes progress. The job's processes are killed."""


@contextmanager
def watched_ranks(supervisor: Supervisor, run: RunDirectory, ranks: int, timeout_s: float) -> Iterator[None]:
    """Inside the block, the supervisor ends a job whose ranks hang, after they have written their stacks.

    Args:
        supervisor: raises HangError from its `check`.
        run: run directory; `heartbeats` is emptied.
        ranks: number of trainer ranks.
        timeout_s: longest time without progress, from the start of the block on.
    """
    shutil.rmtree(run.heartbeats, ignore_errors=True)
    check = _check(run.heartbeats, ranks, timeout_s)
    supervisor.checks.append(check)
    try:
        yield
    finally:
        supervisor.checks.remove(check)


def _check(folder: Path, ranks: int, timeout_s: float) -> Callable[[], None]:
    """Return a check that raises HangError once the counts have not changed for `timeout_s`."""
    seen, since, read = dict[int, str](), time.monotonic(), 0.0

    def check() -> None:
        nonlocal seen, since, read
        now = time.monotonic()
        if now - read < interval_s(timeout_s):
            return
        read, counts = now, _counts(folder, ranks)
        if counts != seen:
            seen, since = counts, now
        elif now - since > timeout_s:
            raise HangError(_hang(folder, ranks, timeout_s))

    return check


def _counts(folder: Path, ranks: int) -> dict[int, str]:
    found = {}
    for rank in range(ranks):
        with suppress(OSError):  # the rank has not begun yet
            found[rank] = heartbeat_file(folder, rank).read_text()
    return found


def _hang(folder: Path, ranks: int, timeout_s: float) -> str:
    """Ask all ranks for their stacks, and return the message for the user."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DUMP).touch()
    deadline = time.monotonic() + interval_s(timeout_s) + _ANSWER_S
    while (silent := _silent(folder, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    text = f"no trainer rank has made progress for {timeout_s:g} s (parallel.collective_timeout_s)"
    if len(silent) < ranks:
        text += f"; stacks: {folder}/rank_*.stacks"
    if silent:
        text += f"; rank {', '.join(map(str, silent))} {WROTE_NONE}"
    return text


def _silent(folder: Path, ranks: int) -> list[int]:
    files = [stack_file(folder, rank) for rank in range(ranks)]
    return [rank for rank, file in enumerate(files) if not file.exists() or not file.stat().st_size]
