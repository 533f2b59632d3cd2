"""Attacks: each one is contained, and honest calls after it are answered correctly and on time.

The service runs as root, as an ordinary user, and as a user without namespaces. `make test` runs every attack as the
user that runs the tests; if that is root, also the first attack of each family as an ordinary user. `make test-all`
runs every attack in every way (see `pytest_collection_modifyitems` in conftest.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tools_sandbox.helpers.attacks import ATTACKS, Attack
from tests.tools_sandbox.helpers.services import running, wait_until
from tools_sandbox.client import SandboxClient
from tools_sandbox.config import PythonConfig

HONEST_CALLS = 4
ON_TIME_S = 20.0
"""Time limit of an honest call, which takes some 10 ms on a quiet machine. It ends a test whose service is stuck."""
_LIMITS = {
    "memory_mib": 512,
    "file_mib": 16,
    "disk_mib": 32,
    "processes": 32,
    "open_files": 64,
    "output_chars": 2000,
    "output_mib": 4,
    "cpu_s": 4,  # a busy machine spends 2 s on filling page tables
}


KINDS = ["root", "user", pytest.param("user without namespaces", marks=pytest.mark.slow_campaign)]
AT_PROCESS = {
    ("fork bomb", "children that never end"): (("error",), "more than 32 processes"),
    ("memory bomb", "shared memory file"): (("error",), "PermissionError"),
    ("proc", "other processes"): (("error",), "PermissionError"),
    ("sys", "read and write"): (("error",), "PermissionError"),
    ("leak", "folders of the machine"): (("ok",), "["),  # names of folders are visible
    ("privilege", "capabilities"): (("error",), "PermissionError"),
    ("poison", "files"): (("error",), "PermissionError"),
    ("infinite loop", "CPU in unreaped children"): (("timeout",), "Time limit"),
}
"""Statuses and text of attacks that another wall stops at level `process`."""
UNBOUNDED_AT_PROCESS = {("disk fill", "inodes"), ("memory bomb", "tmpfs in many files")}
"""Attacks that level `process` does not bound: there, only the disk limits number and total size of files."""


@pytest.fixture(scope="module", params=KINDS)
def attacked(request: pytest.FixtureRequest) -> Iterator[tuple[SandboxClient, Any]]:
    if request.param == "root" and os.getuid() != 0:
        pytest.skip("needs root")
    without_namespaces, as_nobody = "without" in request.param, "user" in request.param and os.getuid() == 0
    level = "process" if without_namespaces else "contained"
    config = {"limits": _LIMITS, "python": {"preload": ["numpy"], "isolation": level}}
    with (
        running(config, as_nobody=as_nobody, without_namespaces=without_namespaces, env={"KEY": "s3cret"}) as service,
        SandboxClient(service.url) as client,
    ):
        yield client, service


def is_at_process(service: Any) -> bool:
    return "isolation: level process" in service.stderr()


def assert_honest_calls_work(client: SandboxClient) -> None:
    def call(number: int) -> tuple[str, str]:
        code = f"import numpy, builtins, os\nlen(range({number})), int(numpy.sum([{number}, 1])), os.listdir()"
        answer = client.call("python", {"code": code}, timeout_s=ON_TIME_S)
        return answer.status, answer.text

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(call, range(HONEST_CALLS)))
    assert answers == [("ok", f"({number}, {number + 1}, [])") for number in range(HONEST_CALLS)]


def assert_no_daemon_is_left() -> None:
    assert not [p for p in psutil.process_iter(["cmdline"]) if "6543.5" in (p.info["cmdline"] or [])]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: f"{attack.family}: {attack.name}")
def test_attack_is_contained_and_honest_calls_succeed(attacked: tuple[SandboxClient, Any], attack: Attack) -> None:
    client, service = attacked
    code = attack.source(int(service.url.rsplit(":", 1)[1]))
    zygote = service.zygote()
    began = time.monotonic()
    answer = client.call("python", {"code": code}, timeout_s=attack.timeout_s)
    assert time.monotonic() - began < attack.timeout_s + ON_TIME_S
    key, at_process = (attack.family, attack.name), is_at_process(service)
    if at_process and key in UNBOUNDED_AT_PROCESS:
        assert answer.status in ("ok", "timeout"), answer
    else:
        statuses, texts = attack.status, attack.expected_texts
        if at_process and key in AT_PROCESS:
            statuses, texts = AT_PROCESS[key][0], (AT_PROCESS[key][1],)
        assert answer.status in statuses and any(text in answer.text for text in texts), answer
        assert "ESCAPED" not in answer.text
    assert_honest_calls_work(client)
    # The zygote is the same as before, and no process is left.
    assert service.zygote() == zygote
    if attack.family == "daemon":
        assert_no_daemon_is_left()


def test_attacks_have_distinct_names() -> None:
    names = {(attack.family, attack.name) for attack in ATTACKS}
    assert len(names) == len(ATTACKS)
    assert names >= UNBOUNDED_AT_PROCESS | set(AT_PROCESS)


def test_every_attack_can_fail() -> None:
    """It names a text of its answer or reports its success, except those whose answer has no text that can be known."""
    silent = {(each.family, each.name) for each in ATTACKS if "" in each.expected_texts and "ESCAPED" not in each.code}
    assert silent == {("result channel", "closed"), ("result channel", "stdout closed"), ("crash", "by its own code")}


@pytest.mark.skipif(os.getuid() != 0, reason="what an attack gets through with depends on the user")
def test_attacks_succeed_outside_sandbox(tmp_path: Path) -> None:
    """Some attacks print ESCAPED outside the sandbox, so that its absence inside proves something."""
    tried = {
        ("signal", "every number"),
        ("socket", "every family"),
        ("proc", "other processes"),
        ("symlink", "above the root"),
    }
    for attack in ATTACKS:
        if (attack.family, attack.name) in tried:
            code = [sys.executable, "-c", attack.source(1)]
            assert (
                "ESCAPED"
                in subprocess.run(code, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False).stdout
            )


HOARDING = """
import ctypes, mmap, os, sys, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
reading, writing = os.pipe()
os.set_blocking(reading, False)
def hold(children, fill):
    for _ in range(children):
        if os.fork() == 0:
            kept = fill(); os.write(writing, b'1'); time.sleep(60)
    full = 0
    while full < children:
        if os.waitpid(-1, os.WNOHANG)[0]: sys.exit('one was ended')
        try: full += len(os.read(reading, 99))
        except BlockingIOError: time.sleep(0.02)
    time.sleep(60)
"""
HOARDS = {
    "own memory": "hold(12, lambda: bytearray(b'1') * (100 << 20))",
    "other programs": """
os.set_inheritable(writing, True)
code = f"import os, time; x = bytearray(b'1') * (70 << 20); os.write({writing}, b'1'); time.sleep(60)"
hold(9, lambda: os.execv(sys.executable, ['python', '-ISc', code]))
""",
    "ended first threads": """
import threading
def fill():
    def late():
        time.sleep(0.3)  # until the first thread is gone
        x = bytearray(b'1') * (100 << 20); os.write(writing, b'1'); time.sleep(60)
    threading.Thread(target=late).start()
    libc.syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)
hold(12, fill)
""",
    "in place of what is preloaded": """
import resource
def fill():  # keep one mapping, 12 MiB larger than what is resident, whose code unmaps all others
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + (12 << 10) << 10
    kept = libc.mmap(None, size, 7, 0x22, -1, 0)
    ctypes.memset(kept, 1, size)
    code = b''
    for start, length in ((0, kept), (kept + size, 0x7ffffffff000 - kept - size)):  # munmap
        code += b'\\x48\\xbf' + start.to_bytes(8, 'little') + b'\\x48\\xbe' + length.to_bytes(8, 'little')
        code += bytes.fromhex('b80b0000000f05')
    code += bytes.fromhex('b8220000000f05ebf7')  # pause, again and again
    ctypes.memmove(kept, code, len(code))
    thread = ctypes.c_long()
    libc.syscall(158, 0x1003, ctypes.byref(thread))  # its address, for the end of restartable sequences
    area = thread.value + ctypes.c_long.in_dll(libc, '__rseq_offset').value
    libc.syscall(334, ctypes.c_void_p(area), 32, 1, 0x53053053)
    os.write(writing, b'1')
    ctypes.CFUNCTYPE(None)(kept)()
hold(30, fill)
""",
    "page tables": """
def fill():
    for n in range(3000): libc.mmap((1 << 40) + (n << 30), 4096, 1, 0x108022, -1, 0)  # takes two page tables
hold(30, fill)
""",
}
"""Ways in which the processes of a call hold more than 512 MiB together, each of them less."""


@pytest.mark.parametrize("hoard", HOARDS)
def test_call_memory_limit_covers_all_processes(attacked: tuple[SandboxClient, Any], hoard: str) -> None:
    client, service = attacked
    answer = client.call("python", {"code": HOARDING + HOARDS[hoard]}, timeout_s=50)
    enforced = "control groups: yes" in service.stderr()
    assert ("one was ended" if enforced else "more than 512 MiB of memory") in answer.text
    assert_honest_calls_work(client)


def test_pages_that_children_share_do_not_end_call(attacked: tuple[SandboxClient, Any]) -> None:
    """Counted once for each process, the shared pages would be more than the limit."""
    client, _ = attacked
    code = "kept = bytearray(b'1') * (100 << 20); import os, time\nfor _ in range(20): os.fork() or time.sleep(60)\n"
    assert client.call("python", {"code": code + "time.sleep(1.5); 'ended by itself'"}, timeout_s=50).status == "ok"


def test_call_has_no_huge_pages_unless_kernel_counts_them(attacked: tuple[SandboxClient, Any]) -> None:
    """A huge page is held although all but one of its 512 parts are unmapped, which only control groups can see."""
    client, service = attacked
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, "python", {"code": "import time; time.sleep(1)"})
        wait_until(lambda: len(service.calls()) >= 3)
        _, _, worker, *_ = service.calls()
        expected = f"THP_enabled:\t{int('control groups: yes' in service.stderr())}\n"
        wait_until(lambda: expected in Path(f"/proc/{worker.pid}/status").read_text())  # set after its start
        call.result()


COLLAPSE = """
import mmap
pages = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE)
pages.write(bytes(b"1") * (4 << 20))
for advice in (14, 25):  # MADV_HUGEPAGE, which is only a wish, and MADV_COLLAPSE, which asks at once
    try: pages.madvise(advice)
    except OSError as error: print(advice, "refused")
try: smaps = open("/proc/self/smaps").readlines()
except PermissionError: smaps = []  # at level `process`
print("huge pages:", sum(int(line.split()[1]) for line in smaps if line.startswith("AnonHugePages")) > 0)
"""


def test_call_cannot_collapse_its_pages_into_huge_ones_unless_kernel_counts_them(
    attacked: tuple[SandboxClient, Any],
) -> None:
    """MADV_COLLAPSE makes huge pages whatever the machine's setting is, but not against that of the process."""
    client, service = attacked
    text = client.call("python", {"code": COLLAPSE}).text
    counted = "control groups: yes" in service.stderr()
    assert ("25 refused" in text) != counted, text
    assert is_at_process(service) or text.endswith(f"huge pages: {counted}"), text


SLOW_OTHERS = """
import os
group = os.getpgid(os.getppid())
tried = [lambda: os.setpriority(os.PRIO_USER, 0, 15), lambda: os.setpriority(os.PRIO_PGRP, group, 15)]
for pid in PIDS:
    tried += [lambda: os.setpriority(os.PRIO_PROCESS, pid, 15), lambda: os.sched_setaffinity(pid, {0})]
    for attempt in tried:
        try: attempt()
        except OSError: pass
os.nice(3), os.sched_getaffinity(0) == os.sched_setaffinity(0, os.sched_getaffinity(0))
print(os.getpriority(os.PRIO_PROCESS, 0) >= 3)
"""


def test_call_cannot_change_priority_or_affinity_of_others(attacked: tuple[SandboxClient, Any]) -> None:
    client, service = attacked
    others = [psutil.Process(service.process.pid), service.zygote()]
    before = [(other.nice(), other.cpu_affinity()) for other in others]
    code = SLOW_OTHERS.replace("PIDS", str([other.pid for other in others]))
    assert client.call("python", {"code": code}).text == "True"
    assert [(other.nice(), other.cpu_affinity()) for other in others] == before


ASYNCIO = """
import asyncio, multiprocessing
async def shout(text):
    process = await asyncio.create_subprocess_exec('tr', 'a-z', 'A-Z', stdin=-1, stdout=-1)
    return (await process.communicate(text.encode()))[0].decode()
async def main():
    return await asyncio.gather(*map(shout, ['ab', 'c']))
print(asyncio.run(main()))
ours, theirs = multiprocessing.Pipe()
ours.send('x' * 10**5); print(len(theirs.recv()))
"""
QUEUES = """
queue = multiprocessing.Queue()
child = multiprocessing.Process(target=queue.put, args=(7,))
child.start(); print(queue.get(timeout=5)); child.join()
with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, -2]))
"""


def test_asyncio_and_multiprocessing_work_inside(
    attacked: tuple[SandboxClient, Any],
) -> None:
    client, service = attacked
    assert client.call("python", {"code": ASYNCIO}, timeout_s=10).text == "['AB', 'C']\n100000"
    if not is_at_process(service):  # multiprocessing keeps its locks as files in /dev/shm
        answer = client.call("python", {"code": ASYNCIO + QUEUES}, timeout_s=10)
        assert answer.text == "['AB', 'C']\n100000\n7\n[1, 2]"


HOLD = """
import errno, socket, time
pairs = []
try:
    while True:
        pairs.append(socket.socketpair())
        for _ in range(40): socket.send_fds(pairs[-1][0], [b'x'], [0] * 250)
except OSError as error:
    print(errno.errorcode[error.errno], flush=True)
time.sleep(1.5)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="starts a program of another user")
def test_zygote_survives_foreign_descriptors_in_flight(attacked: tuple[SandboxClient, Any]) -> None:
    client, service = attacked
    user = psutil.Process(service.process.pid).uids().real
    if user == 0:
        pytest.skip("root's descriptors in flight are not limited")
    zygote = service.zygote()
    holder = subprocess.Popen(["/usr/bin/python3", "-c", HOLD], stdout=subprocess.PIPE, user=user, group=user)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"ETOOMANYREFS\n"
        began = time.monotonic()
        # Processes that were created ahead need no new descriptor.
        calls = PythonConfig().ahead + 1
        assert [client.call("python", {"code": "40 + 2"}, timeout_s=5).text for _ in range(calls)] == ["42"] * calls
        assert time.monotonic() - began > 0.3, "nothing was scarce"
    finally:
        holder.kill()
        holder.wait()
    assert service.zygote() == zygote


SHORT = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    ours, theirs = os.pipe()
    if os.fork() == 0:
        while time.process_time() < 0.02: pass
        os._exit(0)
    os.close(theirs); os.read(ours, 1); os.close(ours)
"""


def test_control_groups_count_cpu_time_of_short_children(
    attacked: tuple[SandboxClient, Any],
) -> None:
    client, service = attacked
    if "control groups: yes" not in service.stderr():
        pytest.skip("without control groups nothing counts it (docs/guides/security.md)")
    assert "CPU time" in client.call("python", {"code": SHORT}, timeout_s=100).text


SPIN = "import os\nfor _ in range(24):\n    if os.fork() == 0: break\nwhile True: pass"
SECRET = """
import contextlib, os, time
open('secret-4711', 'w').write('4711')
with contextlib.suppress(PermissionError): open('/dev/shm/secret-4711', 'w').close()
os.fork()  # shows the test that the files are there
time.sleep(60)
"""
SPY = """
import os
seen = [p for p in next(os.walk('/proc'), ('', [], []))[1] if p.isdigit() and int(p) > 2]
for top in ('/tmp', '/dev/shm', '/run', '/var'):
    seen += [f for _, _, files in os.walk(top) for f in files if 'secret' in f]
seen
"""


def test_call_cannot_see_another_call(attacked: tuple[SandboxClient, Any]) -> None:
    client, service = attacked
    wait_until(lambda: not service.calls())
    with ThreadPoolExecutor(1) as pool:
        victim = pool.submit(client.call, "python", {"code": SECRET}, timeout_s=60)
        wait_until(lambda: len(service.calls()) == 4)
        _, _, worker, _ = service.calls()
        assert client.call("python", {"code": SPY}).text == "[]"
        assert not victim.done()
        worker.kill()
        assert victim.result().status == "error"


@pytest.mark.slow_campaign
def test_call_cannot_starve_other_calls(attacked: tuple[SandboxClient, Any]) -> None:
    client, service = attacked
    served = threading.Event()

    def hog() -> set[str]:
        statuses = set[str]()
        while not served.is_set():  # a limit of the sandbox ends each call after a while
            statuses.add(client.call("python", {"code": SPIN}, timeout_s=5).status)
        return statuses

    wait_until(lambda: not service.calls())
    with ThreadPoolExecutor(2) as pool:
        hogs = [pool.submit(hog) for _ in range(2)]
        try:
            wait_until(lambda: len(service.calls()) > 2 * 24)
            assert_honest_calls_work(client)
        finally:
            served.set()
        assert [each.result() for each in hogs] == [{"timeout"}] * 2


def test_attacked_service_leaves_no_processes_or_files(attacked: tuple[SandboxClient, Any]) -> None:
    _, service = attacked
    deadline = time.monotonic() + 5
    while not service.idle():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "Traceback" not in service.stderr()
    assert "supervisor failed" not in service.stderr()
    assert not list(Path("/dev/shm").glob("*secret-4711*"))
    assert_no_daemon_is_left()
