"""Ends communication that would hang.

Gloo raises when a peer has gone. NCCL waits: for a peer that was killed within a transfer, for one that failed before
the first operation, and when a group with pending work is destroyed. Only aborting the group ends that wait, and
another thread has to do it.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

_POLL_INTERVAL_S = 0.25


class ExchangeAbortedError(RuntimeError):
    """The watchdog has ended a communication; the message has the reason."""


class Watchdog:
    """Context manager that calls `abort` at a deadline, or when the communication has failed elsewhere.

    Args:
        abort: ends all pending operations, so that the thread that waits for them continues. It is called from another
            thread, at most once.
        deadline_s: seconds from the start.
        failed: returns why the communication cannot succeed any more, or "". An exception is a reason, too.

    Raises:
        ExchangeAbortedError: on leaving, if `abort` was called.
    """

    def __init__(self, abort: Callable[[], object], deadline_s: float, failed: Callable[[], str]) -> None:
        self._abort = abort
        self._deadline_s = deadline_s
        self._failed = failed
        self._ended = threading.Event()
        self._reason = ""
        self._thread = threading.Thread(target=self._watch, name="weight-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._reason:
            raise ExchangeAbortedError(self._reason) from error

    def _watch(self) -> None:
        deadline = time.monotonic() + self._deadline_s
        while not self._ended.wait(_POLL_INTERVAL_S):
            try:
                reason = self._failed()
            except Exception as error:  # the store of the group is gone, with the process that kept it
                reason = f"the group has ended: {error}"
            if not reason and time.monotonic() > deadline:
                reason = f"no end after {self._deadline_s:g} s"
            if reason:
                self._reason = reason
                self._abort()
                return
