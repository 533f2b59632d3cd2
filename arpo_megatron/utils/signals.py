"""Signals that ask this process to end: one exception for all of them, deferred or ignored where it must not come."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked this process to end. Unlike KeyboardInterrupt, no library catches it.

    The message, if there is one, reports to the user what was done about it.
    """


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Deliver a signal that arrives inside on leaving. Main thread only.

    Used around a fork: an exception that a handler raises in an at-fork hook (logging has one) is printed and lost, and
    a process that has started but is not recorded would be left behind.
    """
    arrived: list[int] = []
    try:
        with _handled_by(lambda number, frame: arrived.append(number)):
            yield
    finally:
        for late in arrived:
            signal.raise_signal(late)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Defer signals as `interrupts_deferred` does, also for commands that are run inside: they inherit the mask."""
    with interrupts_deferred():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interrupts_call(function: Callable[[], None]) -> Iterator[None]:
    """Call a function for each signal inside, instead of raising `Interrupted`. Main thread only.

    A program that waits in an event loop ends through a flag: an exception that a handler raises in a finalizer (the
    garbage collector may run one at any moment) is printed and lost.
    """
    with _handled_by(lambda number, frame: function()):
        yield


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore signals during a clean-up, also in commands that are run inside. Main thread only."""
    with _handled_by(signal.SIG_IGN):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def interrupt_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP raise `Interrupted`, so that all of them run the same clean-up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    for number in _INTERRUPTS:
        signal.signal(number, interrupt)
