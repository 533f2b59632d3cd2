"""The watchdog: it counts the memory that processes hold together, and looks closely only near the limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.tools_sandbox.helpers.services import running, wait_until
from tools_sandbox.client import SandboxClient
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

# Two processes that share 64 MiB, which exceeds the limit of 100 MiB until the shares are measured.
GROWING = """
import signal
kept = [own(64)]
fork(1, lambda: None)
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
    return looked_mib(Watchdog(pid, preloaded_mib * MIB, limit_mib * MIB))


def looked_mib(watched: Watchdog) -> float:
    """Look until an exact measurement that this look may have begun has ended."""
    watched.look(40)
    wait_until(lambda: (watched._take_result(), watched._measurement is None)[1])
    return watched.look(40).memory_bytes / MIB


def test_pages_that_processes_share_count_once(start: Start) -> None:
    assert 64 < measured_mib(start("kept = own(64); fork(3, lambda: None)", 3)) < 128


def test_preloaded_pages_are_subtracted_once(start: Start) -> None:
    """Children that unmap what they inherit must not hide memory of their own."""
    pid = start("kept = own(64); fork(4, lambda: (kept.close(), own(64)))", 4)
    assert 4 * 64 < measured_mib(pid, preloaded_mib=64) < 5 * 64


def test_page_tables_count(start: Start) -> None:
    # A read of an untouched page costs no memory except its page tables: here two of them.
    pid = start("for n in range(4000): ctypes.string_at(page((1 << 40) + (n << 30)), 1)")
    assert 4000 * 8192 / MIB < measured_mib(pid, limit_mib=20) < 64


def test_mappings_count(start: Start) -> None:
    pid = start("for n in range(40000): page((1 << 40) + (n << 13), 0)")
    assert 40_000 * 256 / MIB < measured_mib(pid, limit_mib=16) < 40


def test_mappings_count_for_every_fork_that_led_to_them(start: Start) -> None:
    """Linux links each mapping with memory of its own to those of all processes that it was copied from."""
    code = "for n in range(8000): ctypes.memset(page((1 << 40) + (n << 13), 3), 1, 1)\n"
    code += "for depth in range(5):\n    if os.fork() != 0: break\n"
    assert 5 * 8000 * 256 + 15 * 8000 * 170 < measured_mib(start(code, 5), limit_mib=60) * MIB - 8000 * 4096 < 100 * MIB


def test_upper_bound_follows_limit_of_machine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = start("libc.mmap(None, 1 << 30, 0, 0x4022, -1, 0)")  # address space of 262,144 pages
    for limit, most in ((200_000, 200_000), (1 << 20, 262_144)):
        monkeypatch.setattr(watchdog, "_MOST_MAPPINGS", limit)
        process = watchdog._find_memory(pid, [Path(f"/proc/{pid}")], forks=0)
        assert process is not None
        assert most * 256 < process.most_bytes < most * 256 + 64 * MIB


def test_memory_of_process_without_first_thread_counts(start: Start) -> None:
    code = """
import threading
def fill(): time.sleep(0.2); kept = own(64); os.write(1, b'.'); time.sleep(60)
threading.Thread(target=fill).start()
libc.syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)
"""
    assert 64 < measured_mib(start(code)) < 128


def test_memory_far_below_limit_is_not_measured_exactly(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(watchdog, "_page_bytes")
    assert 64 < measured_mib(start("kept = own(64)"), limit_mib=512) < 512


def test_exact_measurement_rests_unless_memory_grows(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, process_time=lambda: 0.4)
    monkeypatch.setattr(watchdog, "time", clock)
    forks, fork = list[float](), os.fork
    monkeypatch.setattr(os, "fork", lambda: (forks.append(clock.now), fork())[1])
    pid = start(GROWING, 1)
    watched = Watchdog(pid, 0, 100 * MIB)
    for clock.now in (0.0, 3.5, 3.7):
        assert 64 < looked_mib(watched) < 100
    assert forks == [0.0, 3.7]
    os.kill(pid, signal.SIGUSR1)
    wait_until(lambda: watchdog._find_memory(pid, [Path(f"/proc/{pid}")], forks=0).most_bytes > 128 * MIB)
    assert looked_mib(watched) > 100
    assert forks[2] == 3.7


def test_call_takes_no_memory_while_it_is_measured(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many mappings make a measurement slow. A process that the code has stopped itself stays stopped."""
    code = "import signal\nkept = own(64)\nfork(2, lambda: None)"
    parent = start(code, 2)
    children = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    os.kill(children[0], signal.SIGSTOP)

    def stopped() -> list[bool]:
        return [psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in (parent, *children)]

    wait_until(lambda: stopped() == [False, True, False])
    exact = watchdog._page_bytes
    monkeypatch.setattr(watchdog, "_page_bytes", lambda process: (time.sleep(0.3), exact(process))[1])
    watched = Watchdog(parent, 0, 100 * MIB)  # three times 64 MiB might be too much
    watched.look(8)
    wait_until(lambda: stopped() == [True, True, True])
    assert looked_mib(watched) < 100
    wait_until(lambda: stopped() == [False, True, False])
    watched.look(8)
    assert stopped() == [False, True, False], "the memory is known, and has not grown"
    os.kill(children[0], signal.SIGCONT)


def test_call_continues_if_a_process_ends_before_it_is_measured(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = start("kept = own(64)\nfork(1, lambda: None)", 1)
    (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()

    class Measurement(watchdog._Measurement):
        def __init__(self, processes: list[watchdog._Process], most_bytes: int, enough_bytes: int) -> None:
            super().__init__(processes, most_bytes, enough_bytes)
            os.kill(int(child), signal.SIGKILL)
            wait_until(lambda: psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE)

    monkeypatch.setattr(watchdog, "_Measurement", Measurement)
    watched = Watchdog(parent, 0, 100 * MIB)  # two times 64 MiB might be too much, 64 MiB are not
    watched.look(8)
    wait_until(lambda: psutil.Process(parent).status() == psutil.STATUS_STOPPED)
    watched.look(8)
    wait_until(lambda: psutil.Process(parent).status() != psutil.STATUS_STOPPED)
    assert watched.look(8).memory_bytes < 100 * MIB


HIDE_AND_FILL = """
import ctypes, mmap, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
begin = time.monotonic() + 8
for _ in range(20):
    if os.fork() == 0: break
for n in range(20000): libc.mmap((1 << 40) + (n << 13), 4096, 1, 0x100022, -1, 0)
time.sleep(max(0, begin - time.monotonic()))
kept = mmap.mmap(-1, 220 << 20, flags=mmap.MAP_PRIVATE)
for n in range(0, 220 << 20, 4096): kept[n] = 1
time.sleep(60)
"""


def used_mib() -> float:
    """Return the memory of all processes of the machine, with the kernel's for them."""
    sizes = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text()))
    return sum(int(sizes[name]) for name in ("AnonPages", "PageTables", "Slab")) / 1024


@pytest.mark.slow_campaign
@pytest.mark.parametrize("without_namespaces", [False, True], ids=["contained", "process"])
def test_memory_of_call_stays_below_twice_its_limit_behind_many_mappings(without_namespaces: bool) -> None:
    """Nothing else may run on the machine, whose memory is measured. Prints the figure of docs/guides/security.md."""
    level = "process" if without_namespaces else "contained"
    config = {"limits": {"memory_mib": 512, "processes": 64, "cpu_s": 60}, "python": {"isolation": level}}
    with (
        running(config, as_nobody=os.getuid() == 0, without_namespaces=without_namespaces) as service,
        SandboxClient(service.url) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        client.call("python", {"code": "1"})
        most = before = used_mib()
        call = pool.submit(client.call, "python", {"code": HIDE_AND_FILL}, timeout_s=60)
        while not call.done():
            most = max(most, used_mib())
            time.sleep(0.02)
    print(f"{level}: {most - before:.0f} MiB at a limit of 512 MiB")
    assert "more than 512 MiB of memory" in call.result().text
    assert most - before < 2 * 512


def test_look_does_not_wait_for_exact_measurement(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_page_bytes", lambda _: time.sleep(60))
    watched = Watchdog(start("kept = own(64)"), 0, MIB)
    for lost in range(3):
        assert [watched.look(8).memory_bytes for _ in range(3)] == [0, 0, 0]
        assert watched._lost == lost
        assert watched._measurement is not None
        os.kill(watched._measurement._pid, signal.SIGKILL)
        wait_until(lambda: (watched._take_result(), watched._measurement is None)[1])
    assert watched.look(8).memory_bytes > 64 * MIB  # a call that ends its measurement gains nothing
