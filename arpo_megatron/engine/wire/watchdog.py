"""Abort communication that would hang.

Gloo raises when a peer has gone. NCCL waits: for a peer that was killed within a transfer, for one that failed before
the first operation, and when a group with pending work is destroyed. Only aborting the group ends that wait, and
another thread has to do it.
"""

import threading
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
        failed: returns why the communication cannot succeed any more, or "". An exception is a reason, too. It may
            block: the deadline has a thread of its own.

    Raises:
        ExchangeAbortedError: on leaving, if `abort` was called.
    """

    def __init__(self, abort: Callable[[], object], deadline_s: float, failed: Callable[[], str]) -> None:
        self._abort = abort
        self._failed = failed
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._reason = ""
        self._timer = threading.Timer(deadline_s, self._end, [f"no end after {deadline_s:g} s"])
        self._poller = threading.Thread(target=self._poll, name="weight-watchdog")
        # A blocked `failed` is not waited for: it may ask a machine that no longer answers.
        self._timer.daemon = self._poller.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        self._poller.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._ending:  # an abort that has begun ends first
            self._ended.set()
        if self._reason:
            raise ExchangeAbortedError(self._reason) from error

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_INTERVAL_S):
            try:
                reason = self._failed()
            except Exception as error:  # the store of the group is gone, with the process that kept it
                reason = f"the group has ended: {error}"
            if reason:
                self._end(reason)

    def _end(self, reason: str) -> None:
        with self._ending:
            if not self._ended.is_set():
                self._ended.set()
                self._reason = reason
                self._abort()
