"""How a trainer rank ends when something fails: its own traceback first, and the other ranks soon after.

A rank whose peer has died fails too, in whatever collective it sat in. What the user must read is the first failure:
- a failing rank tells its traceback at once, before anything is taken down that other ranks would notice;
- a rank that lost a peer waits before it tells, and in that time torchrun, which saw the peer end, ends it;
- no clean-up may hold a failed rank back: after `CLEANUP_S` seconds it ends, whatever it was doing.
torchrun ends the other ranks with a signal that stops them even inside a collective.
"""

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from arpo_megatron.errors import UserError
from arpo_megatron.utils.processes import JOB_PID, RANK_FAILED, RANK_FAILED_END, die_with_parent
from arpo_megatron.utils.signals import Interrupted

CLEANUP_S = 10.0
PEER_GRACE_S = 8.0
_PEER_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo/transport|remote process exited|nccl communicator was aborted",
    re.IGNORECASE,
)
_told: list[BaseException] = []


def rank_main(main: Callable[[], None]) -> Callable[[], None]:
    """Make `main` the entry point of a rank.

    It dies with the job that started it, and whatever it raises is told as this module says, and ends the process.
    """

    @wraps(main)
    def run() -> None:
        _die_with_job()
        get_error_handler().initialize()
        try:
            main()
        except (SystemExit, KeyboardInterrupt, Interrupted):
            raise
        except BaseException as error:
            log_failure(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # exit handlers wait for threads, and sockets are closed only now

    return run


def _die_with_job() -> None:
    """Be killed with torchrun; and end here if the job died while this rank was being started."""
    die_with_parent()
    job = os.environ.get(JOB_PID)
    if job is not None and not Path(f"/proc/{job}").exists():
        os._exit(1)


def log_failure(error: BaseException) -> None:
    """Write the traceback to the log and to torchrun; once for an error, however often it is called on its way up."""
    if _told:
        return
    _told.append(error)
    if _lost_a_peer(error):
        time.sleep(PEER_GRACE_S)
    rank = os.environ.get("RANK", "0")
    # A UserError's line says it all; the command line shows it alone.
    text = f"arpo: {error}\n" if isinstance(error, UserError) else "".join(traceback.format_exception(error))
    with suppress(OSError):  # a full disk, which the error may tell of, must not take its place
        # One write: the ranks share the log, and their lines must not mix.
        os.write(2, f"{RANK_FAILED.format(rank=rank)}\n{text}{RANK_FAILED_END}\n".encode(errors="replace"))
        get_error_handler().record_exception(error)
    _end_after(CLEANUP_S)


def _lost_a_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone."""
    return isinstance(error, dist.DistError | RuntimeError | OSError) and bool(_PEER_LOST.search(str(error)))


def _end_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
