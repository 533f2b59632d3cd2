"""Entry point of a trainer rank, and how it ends when something fails.

A rank whose peer has died fails too, in the collective that it waits in. The user must read the first failure:
- A failing rank logs its traceback at once, before it closes anything that other ranks would notice.
- A rank that lost a peer waits before it logs. Meanwhile the launcher, which saw the peer end, ends it.
- A failed rank ends after `CLEANUP_S` seconds, even if its clean-up hangs.
The launcher ends the other ranks with a signal that stops them even inside a collective.
"""

import faulthandler
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps

import torch.distributed as dist

from arpo_megatron.errors import UserError
from arpo_megatron.utils.processes import RANK_FAILED, RANK_FAILED_END, die_with_parent
from arpo_megatron.utils.signals import Interrupted

CLEANUP_S = 10.0
PEER_GRACE_S = 8.0
_PEER_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo/transport|remote process exited|nccl communicator was aborted",
    re.IGNORECASE,
)
_logged: list[BaseException] = []


def rank_main(main: Callable[[], None]) -> Callable[[], None]:
    """Make `main` the entry point of a rank, which dies with its launcher and ends at any exception of `main`."""

    @wraps(main)
    def run() -> None:
        die_with_parent()
        faulthandler.enable()
        try:
            main()
        except (SystemExit, KeyboardInterrupt, Interrupted):
            raise
        except BaseException as error:
            log_failure(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # exit handlers would wait for threads; sockets close only now

    return run


def log_failure(error: BaseException) -> None:
    """Write the traceback to the log; further calls do nothing."""
    if _logged:
        return
    _logged.append(error)
    if _lost_a_peer(error):
        time.sleep(PEER_GRACE_S)
    rank = os.environ.get("RANK", "0")
    # A UserError needs no traceback; the command line shows its line alone.
    text = f"arpo: {error}\n" if isinstance(error, UserError) else "".join(traceback.format_exception(error))
    with suppress(OSError):  # a full disk must not hide the error
        # One write: the ranks share the log, and their lines must not mix.
        os.write(2, f"{RANK_FAILED.format(rank=rank)}\n{text}{RANK_FAILED_END}\n".encode(errors="replace"))
    _end_after(CLEANUP_S)


def _lost_a_peer(error: BaseException) -> bool:
    return isinstance(error, dist.DistError | RuntimeError | OSError) and bool(_PEER_LOST.search(str(error)))


def _end_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
