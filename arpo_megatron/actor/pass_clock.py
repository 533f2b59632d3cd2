"""Seconds that a rank computes, without its waits for other data-parallel ranks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class PassClock:
    """Counts the seconds of passes over packs until the reduction of gradients, in which fast ranks wait for slow ones.

    Ranks of one model replica wait for each other inside a pass, so they count the same seconds. On CUDA they are the
    seconds of the stream that computes: reductions that overlap with a backward pass have another stream. The host
    does not wait for the device at either end of a pass.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._started: Any = None
        self._pass: tuple[Any, Any] | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the time of the block; `stopping` ends the count earlier."""
        self._add()  # the host has read the results of the last pass, so its end has come
        self._started = _now()
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
        """Return the seconds since the last call. The host waits for the end of the last pass."""
        self._add()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _stop(self) -> None:
        if self._started is not None:
            self._pass, self._started = (self._started, _now()), None

    def _add(self) -> None:
        if self._pass is not None:
            self._seconds += _between(*self._pass)
            self._pass = None


def _now() -> Any:
    """Return this moment in seconds; on CUDA an event after the kernels that are launched."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    if isinstance(end, float):
        return end - float(start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
