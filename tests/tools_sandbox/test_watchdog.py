"""The watchdog: it counts the memory that processes hold together, and looks closely only near the limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tools_sandbox.helpers.services import wait_until
from tools_sandbox.python_tool import watchdog
from tools_sandbox.python_tool.watchdog import Watchdog

MIB = 1 << 20
PRELUDE = """
import ctypes, mmap, os, sys, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
def own(mib):
    memory = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE); memory.write(b'x' * (mib << 20)); return memory
def page(address, protection=1):  # of the address space only
    return libc.mmap(address, 4096, protection, 0x100022, -1, 0)
def fork(children, work):
    for _ in range(children):
        if os.fork() == 0:
            kept = work(); os.write(1, b'.'); time.sleep(60); os._exit(0)
"""

# The upper bound counts a GiB of address space as 64 MiB of mappings, which exceeds the limit of 100 MiB.
GROWING = """
import signal
reserved = libc.mmap(0, 1 << 30, 0, 0x22, -1, 0)
kept = [own(64)]
signal.signal(signal.SIGUSR1, lambda *_: kept.append(own(64)))
"""

Start = Callable[..., int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a process with code, waits until it and its children are ready, and returns it."""
    started = list[subprocess.Popen[bytes]]()

    def run(code: str, children: int = 0) -> int:
        command = [sys.executable, "-c", f"{PRELUDE}{code}\nos.write(1, b'.'); time.sleep(60)"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, bufsize=0)
        started.append(process)
        assert process.stdout is not None
        for _ in range(1 + children):
            assert process.stdout.read(1) == b"."
        return process.pid

    yield run
    for process in started:
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=True)
        process.communicate()


def measured_mib(pid: int, preloaded_mib: int = 0, limit_mib: int = 1) -> float:
    return Watchdog(pid, preloaded_mib * MIB, limit_mib * MIB).look(40).memory_bytes / MIB


def test_pages_that_processes_share_count_once(start: Start) -> None:
    assert 64 < measured_mib(start("kept = own(64); fork(3, lambda: None)", 3)) < 128


def test_preloaded_pages_are_subtracted_once(start: Start) -> None:
    """Children that unmap what they inherit must not hide memory of their own."""
    pid = start("kept = own(64); fork(4, lambda: (kept.close(), own(64)))", 4)
    assert 4 * 64 < measured_mib(pid, preloaded_mib=64) < 5 * 64


def test_page_tables_count(start: Start) -> None:
    # A read of an untouched page costs no memory except its page tables: here two of them.
    pid = start("for n in range(4000): ctypes.string_at(page((1 << 40) + (n << 30)), 1)")
    assert 4000 * 8192 / MIB < measured_mib(pid) < 64


def test_mappings_count(start: Start) -> None:
    pid = start("for n in range(40000): page((1 << 40) + (n << 13), 0)")
    assert 40_000 * 256 / MIB < measured_mib(pid) < 40


def test_memory_of_process_without_first_thread_counts(start: Start) -> None:
    code = """
import threading
def fill(): time.sleep(0.2); kept = own(64); os.write(1, b'.'); time.sleep(60)
threading.Thread(target=fill).start()
libc.syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)
"""
    assert 64 < measured_mib(start(code)) < 128


def test_memory_far_below_limit_is_not_measured_exactly(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(watchdog, "_exact_bytes")
    assert 64 < measured_mib(start("kept = own(64)"), limit_mib=512) < 512


def test_exact_measurement_rests_unless_memory_grows(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(watchdog, "time", clock)
    looked, limit = list[Path](), 100 * MIB
    exact = watchdog._exact_bytes

    def slow(process: watchdog._Process) -> int:
        clock.now += 0.1
        looked.append(process.folder)
        return exact(process)

    monkeypatch.setattr(watchdog, "_exact_bytes", slow)
    pid = start(GROWING)
    watched = Watchdog(pid, 0, limit)
    for _ in range(3):
        assert watched.look(8).memory_bytes < limit
    assert len(looked) == 1
    clock.now += 2.0
    watched.look(8)
    assert len(looked) == 2
    os.kill(pid, signal.SIGUSR1)
    wait_until(lambda: watchdog._find_memory([Path(f"/proc/{pid}")]).most_bytes > 192 * MIB)
    assert watched.look(8).memory_bytes > limit
