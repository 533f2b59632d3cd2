"""Signals that ask a process to end."""

import signal
import weakref

from arpo_megatron.utils.signals import interrupts_call


class Kept:
    """An object with a finalizer."""


def test_signal_in_a_finalizer_is_not_lost() -> None:
    """The garbage collector may run a finalizer at any moment; an exception in one is printed and lost."""
    asked: list[bool] = []
    kept = Kept()
    weakref.finalize(kept, signal.raise_signal, signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    with interrupts_call(lambda: asked.append(True)):
        del kept
        assert asked == [True]
    assert signal.getsignal(signal.SIGTERM) is before
