"""`python -m arpo_megatron.launch.ranks COUNT MODULE ARGUMENTS...`: start the trainer ranks of one machine.

Each rank runs `python -m MODULE ARGUMENTS...` with the variables that torch reads. The ranks find each other through a
file in a directory that only this user may enter, so no other user can join them.

The first rank that fails ends the others; the last line of the output names it, and its exit code is that of this
process. A signal to this process ends all ranks, and they die with it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from arpo_megatron.errors import USER_ERROR_EXIT_CODE, UserError
from arpo_megatron.utils.processes import REAP_DEADLINE_S, STORE_FILE, bind_to_parent, exit_code, how_it_ended
from arpo_megatron.utils.signals import Interrupted, interrupt_on_signals, interrupts_deferred, interrupts_ignored
from arpo_megatron.utils.temporary import temporary_folder

_FOLDER_PREFIX = "arpo-ranks-"
_POLL_INTERVAL_S = 0.05
_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL: less than the supervisor waits before it kills this process."""

Rank = subprocess.Popen[bytes]


def main() -> None:
    """Run the ranks and exit with 0 if all of them did, else with the exit code of a rank that failed."""
    count, command = int(sys.argv[1]), [sys.executable, "-m", *sys.argv[2:]]
    interrupt_on_signals()
    try:
        sys.exit(run_ranks(command, count))
    except Interrupted:
        sys.exit(128 + signal.SIGTERM)
    except UserError as error:
        print(f"arpo: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE)


def run_ranks(command: Sequence[str], count: int) -> int:
    """Run a command on `count` ranks; return 0, or the exit code of a rank that failed; a killed rank goes first.

    Raises UserError if there is no folder for the ranks' store.
    """
    folder = temporary_folder(_FOLDER_PREFIX)
    ranks: list[Rank] = []
    try:
        with interrupts_deferred():
            for number in range(count):
                ranks.append(_start(command, number, count, folder.path / "store"))
        failed = _first_failure(ranks)
    finally:
        with interrupts_ignored():
            _end(ranks)
            folder.remove()
    if failed is None:
        return 0
    number, code = failed
    print(f"arpo: rank {number} of {count} {how_it_ended(code)}; all ranks were ended", file=sys.stderr, flush=True)
    return exit_code(code)


def _start(command: Sequence[str], number: int, count: int, store: Path) -> Rank:
    environment = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    environment |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        STORE_FILE: str(store),
    }
    if count > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # otherwise every rank would have a thread per core
    return subprocess.Popen(
        command,
        env=environment,
        preexec_fn=partial(bind_to_parent, os.getpid()),  # noqa: PLW1509  (prctl and getppid only)
    )


def _first_failure(ranks: Sequence[Rank]) -> tuple[int, int] | None:
    """Wait for the ranks; return number and return code of one that failed, None if all ended well."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if failed := [(code, number) for number, code in enumerate(codes) if code]:
            code, number = min(failed)  # a killed rank, with a negative code, is the cause: its peers fail later
            return number, code
        if None not in codes:
            return None
        time.sleep(_POLL_INTERVAL_S)


def _end(ranks: Sequence[Rank]) -> None:
    """End the ranks that still run. One that the kernel does not end in time is left: it must not hold up the job."""
    for number, within_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, REAP_DEADLINE_S)):
        for rank in ranks:
            rank.send_signal(number)  # does nothing to one that has ended
        deadline = time.monotonic() + within_s
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)


if __name__ == "__main__":
    main()
