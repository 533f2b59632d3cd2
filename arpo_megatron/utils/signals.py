"""Signals that ask this process to end: one exception for all of them, deferred or ignored where it must not come."""

import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S = 0.02
_Handler = Callable[[int, FrameType | None], Any] | signal.Handlers
_blocks: list[_Handler] = []
"""The handlers of the blocks below that are entered. The last one holds at once, while the handlers of the process are
exchanged one by one: a signal in the middle must not raise."""


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

    A program that waits in an event loop ends through a flag: an exception that a handler raises in a callback of the
    loop is logged and lost.
    """
    with _handled_by(lambda number, frame: function()):
        yield


def run_in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does. A signal cancels it, and `Interrupted` is raised after its clean-up.

    The handler does not raise: the exception would end whichever task runs at that moment, and could be lost with it.
    """
    import asyncio  # late: it takes longer to import than the handlers may wait

    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(work)
    arrived: list[bool] = []

    async def cancelled_by_signals() -> T:
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()

        def cancel() -> None:
            arrived.append(True)
            loop.call_soon_threadsafe(task.cancel)

        with interrupts_call(cancel):
            return await task

    try:
        return asyncio.run(cancelled_by_signals())
    except asyncio.CancelledError:
        if arrived:
            raise Interrupted from None
        raise


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore signals during a clean-up, also in commands that are run inside. Main thread only."""
    with _handled_by(signal.SIG_IGN):
        yield


@contextmanager
def _handled_by(handler: _Handler) -> Iterator[None]:
    before = dict[signal.Signals, Any]()
    _blocks.append(handler)
    try:
        for number in _INTERRUPTS:
            before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        _blocks.pop()


def interrupt_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP raise `Interrupted`, so that all of them run the same clean-up.

    One that is raised in a finalizer, which Python would print and forget, is raised again after it.
    """
    for number in _INTERRUPTS:
        signal.signal(number, _interrupt)
    others = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is not Interrupted:
            others(unraisable)
            return
        with suppress(RuntimeError):  # at the end of the interpreter there is nothing left to interrupt
            main = threading.main_thread().ident
            again = threading.Timer(_AGAIN_S, signal.pthread_kill, (main, signal.SIGINT))
            again.daemon = True
            again.start()

    sys.unraisablehook = hook


def end_on_signals() -> None:
    """Undo `interrupt_on_signals` after all clean-up: a signal ends the process at once, and prints nothing."""
    for number in _INTERRUPTS:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _blocks:
        raise Interrupted
    if not isinstance(handler := _blocks[-1], signal.Handlers):
        handler(number, frame)
