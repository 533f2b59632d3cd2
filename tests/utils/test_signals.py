"""Signals that ask a process to end."""

import asyncio
import signal
import subprocess
import sys
import textwrap
import weakref

import pytest

from arpo_megatron.utils.signals import interrupts_call, run_in_loop


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


def ended(code: str) -> tuple[int, str, str]:
    """Run code after `interrupt_on_signals`; return exit code, output and errors."""
    command = [sys.executable, "-c", f"{START}\n{textwrap.dedent(code)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


START = """
import atexit, signal, sys, time, types
from arpo_megatron.utils import signals
from arpo_megatron.utils.signals import Interrupted, interrupt_on_signals, interrupts_ignored
interrupt_on_signals()
"""


def test_interruption_of_a_finalizer_comes_after_it() -> None:
    code = """
        class Kept:
            def __del__(self):
                signal.raise_signal(signal.SIGINT)
        try:
            kept = Kept()
            del kept
            time.sleep(20)
            print("lost")
        except Interrupted:
            print("interrupted")
    """
    assert ended(code) == (0, "interrupted\n", "")


def test_signal_between_two_handlers_leaves_none_of_them_behind() -> None:
    """Handlers are installed one by one: the signal comes after the first, at both ends of the block."""
    code = """
        real = signal.signal
        def signal_after_the_first(number, handler):
            before = real(number, handler)
            if number == signal.SIGINT:
                signal.raise_signal(signal.SIGTERM)
            return before
        signal.signal = signal_after_the_first
        try:
            with interrupts_ignored():
                print("inside")
        except Interrupted:
            pass
        signal.signal = real
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            try:
                signal.raise_signal(number)
                print("ignored")
            except Interrupted:
                print("interrupted")
    """
    assert ended(code) == (0, "inside\n" + "interrupted\n" * 3, "")


def test_second_signal_after_the_command_has_no_traceback() -> None:
    code = """
        def run_command(_):
            atexit.register(signal.raise_signal, signal.SIGINT)
            raise Interrupted
        sys.modules["arpo_megatron.cli.main"] = types.SimpleNamespace(run_command=run_command)
        from arpo_megatron.__main__ import main
        sys.argv = ["arpo", "view"]
        main()
    """
    assert ended(code) == (-signal.SIGINT, "", "arpo: interrupted\n")


def test_signal_ends_an_event_loop_in_order() -> None:
    """The signal comes while a task of a group computes: an exception there would end only that task."""
    code = """
        import asyncio
        from arpo_megatron.utils.signals import run_in_loop
        async def busy(number):
            try:
                while True:
                    if number == 1:
                        signal.raise_signal(signal.SIGINT)
                    await asyncio.sleep(0.01)
            finally:
                print("cleaned up")
        async def main():
            async with asyncio.TaskGroup() as group:
                for number in range(2):
                    group.create_task(busy(number))
        try:
            run_in_loop(main())
        except Interrupted:
            print("interrupted")
    """
    assert ended(code) == (0, "cleaned up\n" * 2 + "interrupted\n", "")


def test_loop_returns_what_its_coroutine_returns() -> None:
    async def one() -> int:
        return 1

    async def failing() -> int:
        raise ValueError("wrong")

    assert run_in_loop(one()) == 1
    assert asyncio.run(asyncio.to_thread(run_in_loop, one())) == 1, "also in another thread"
    with pytest.raises(ValueError, match="wrong"):
        run_in_loop(failing())
