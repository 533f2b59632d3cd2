"""Seconds that a rank computes, without its waits for other data-parallel ranks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class PassClock:
    """Counts the seconds of passes over packs until the reduction of gradients, in which fast ranks wait for slow ones.

    Ranks of one model replica wait for each other inside a pass, so they count the same seconds.
    """

    def __init__(self) -> None:
        self._seconds, self._started = 0.0, 0.0
        self._running = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the time of the block; `stopping` ends the count earlier."""
        self._running, self._started = True, time.monotonic()
        try:
            yield
        finally:
            self._stop()

    def stopping(self, reduce: Callable[..., None]) -> Callable[..., None]:
        """Return `reduce`, a function that waits for other ranks, preceded by the end of the count."""

        def stop_and_reduce(*arguments: Any, **named: Any) -> None:
            self._stop()
            reduce(*arguments, **named)

        return stop_and_reduce

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _stop(self) -> None:
        if not self._running:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels run later than they are launched
        self._running = False
        self._seconds += time.monotonic() - self._started
