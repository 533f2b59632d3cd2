"""Mixed load with hostile callers and killed workers: every call is answered once and correctly."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.tools_sandbox.helpers.hostile_site import PERMITTED, SECRET, Site, hostile_site
from tests.tools_sandbox.helpers.services import metric, wait_until
from tools_sandbox.client import AsyncSandboxClient, ToolAnswer

IN_FLIGHT = 64
ATTACK_SHARE = 0.02
SECRET_VARIABLE = "a-secret-of-the-service"
ATTACKS = [
    "import os\nwhile True: os.fork()",
    "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "x = bytearray(1 << 34)",
    "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "f = open('fill', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "while True: print('x' * 100_000)",
    "while True: pass",
    "import re; re.match(r'(a|aa)+$', 'a' * 60 + 'b')",
    "import os, signal; os.kill(-1, signal.SIGKILL)",
    "import os, signal; os.kill(os.getppid(), signal.SIGKILL); os.killpg(0, signal.SIGKILL)",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(600)",
    "import ctypes; ctypes.string_at(0)",
    "import os; os._exit(0)",
    "import os, subprocess; subprocess.run(['cat', f'/proc/{os.getppid()}/environ'], capture_output=True).stdout",
    "import socket; socket.create_connection(('127.0.0.1', 22), 2)",
    "def f(): f()\nimport sys; sys.setrecursionlimit(10**9); f()",
]


@dataclass
class Load:
    """The calls of a load test and their results."""

    service: Any
    site: Site
    calls: int
    kills: int
    seed: int = 7
    wrong: list[str] = field(default_factory=list)
    answered: Counter[int] = field(default_factory=Counter)
    executions_due: int = 0
    """Expected executions of the python tool."""
    rss_mb: dict[int, float] = field(default_factory=dict)
    """Memory of the service's main process by number of calls."""

    async def run(self) -> float:
        """Make all calls. Return the seconds that they took."""
        draw, slots, began = random.Random(self.seed), asyncio.Semaphore(IN_FLIGHT), time.monotonic()
        kill_at = {self.calls * (n + 1) // (self.kills + 1) for n in range(self.kills)}
        async with AsyncSandboxClient(self.service.url) as client, asyncio.TaskGroup() as group:
            for number in range(self.calls):
                await slots.acquire()
                if number in kill_at:
                    draw.choice(self.service.workers()).send_signal(signal.SIGKILL)
                if number % (self.calls // 10) == 0:
                    self.rss_mb[number] = psutil.Process(self.service.process.pid).memory_info().rss / 1e6
                task = group.create_task(self._one(client, number, draw.random(), draw))
                task.add_done_callback(lambda _: slots.release())
        self.rss_mb[self.calls] = psutil.Process(self.service.process.pid).memory_info().rss / 1e6
        return time.monotonic() - began

    async def _one(self, client: AsyncSandboxClient, number: int, kind: float, draw: random.Random) -> None:
        async def call(tool: str, timeout_s: float = 60.0, **arguments: object) -> ToolAnswer:
            return await client.call(tool, arguments, trajectory_id=f"t{number % 40}", timeout_s=timeout_s)

        self.executions_due += kind < 0.45
        if kind < ATTACK_SHARE:
            answer = await call("python", 1.5, code=draw.choice(ATTACKS))
            correct = SECRET_VARIABLE not in answer.text
        elif kind < 0.45:
            answer = await call("python", code=f"{number} * 7")
            correct = (answer.status, answer.text) == ("ok", str(number * 7))
        elif kind < 0.85:
            fact = draw.randrange(3000) if kind < 0.75 else number % 5
            answer = await call("search", query=f"What is the value of fact{fact}?")
            correct = (answer.status, answer.text) == ("ok", f"Page 1: fact{fact} value{fact}")
        elif kind < 0.95:
            answer = await call("browse", url=self.site.url(f"/page?{number}"))
            correct = answer.status == "ok" and "417 inhabitants" in answer.text
        elif kind < 0.97:
            answer = await call("browse", url=self.site.url(draw.choice(["/to/inside", "/loop", "/nested", "/bomb"])))
            correct = SECRET not in answer.text
        else:
            answer = await call(draw.choice(["python", "search", "shell"]), nonsense=number)
            correct = answer.status in ("error", "refused")
        self.answered[number] += 1
        if not correct:
            self.wrong.append(f"{number}: {kind:.3f}: {answer}")


def namespaces(pids: Iterable[int]) -> set[str]:
    """Return the namespaces of processes, as far as they are readable."""
    found = set[str]()
    for pid in pids:
        for kind in ("pid", "net", "mnt", "user", "ipc"):
            with suppress(OSError):
                found.add(str(Path(f"/proc/{pid}/ns/{kind}").readlink()))
    return found


def kinds(place: Path) -> list[str]:
    """Return the names of files without their last part, which is random: a new worker has a new folder."""
    return sorted(each.name.rpartition("-")[0] for each in place.iterdir())


def mounts(place: Path) -> list[str]:
    """Return the mounts, except those in folders of other tests, which change meanwhile."""
    lines, others = Path("/proc/mounts").read_text().splitlines(), Path(tempfile.gettempdir())
    return [line for line in lines if others not in (at := Path(line.split()[1])).parents or at.is_relative_to(place)]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with hostile_site() as running:
        yield running


@pytest.mark.parametrize(("calls", "kills"), [(150, 1), pytest.param(10_000, 2, marks=pytest.mark.slow_campaign)])
@pytest.mark.timeout(1500)
def test_mixed_load_is_answered_once_and_rightly(
    start_service: Callable[..., Any], site: Site, tmp_path: Path, calls: int, kills: int
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o755)
    corpus = tmp_path / "facts.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"fact{n} value{n}"}) + "\n" for n in range(3000)))
    config = {
        "search": {"sources": [{"path": str(corpus), "format": "jsonl"}]},
        "browse": {"enabled": True, "allow_networks": [f"{PERMITTED}/32"], "max_bytes": 1_000_000},
        "limits": {"memory_mib": 512, "disk_mib": 32, "processes": 32, "cpu_s": 5},
        # Small, so that it is full early and later growth is not the cache.
        "cache": {"sqlite_path": str(tmp_path / "answers.db"), "entries": 200},
        "workers": 2,
    }
    service = start_service(config, env={"TMPDIR": str(place), "SERVICE_SECRET": SECRET_VARIABLE})
    family_before, folders_before = len(service.at_work()), kinds(place)
    mounts_before = mounts(place)
    before = len(namespaces(each.pid for each in service.at_work()))
    load = Load(service, site, calls, kills)
    seconds = asyncio.run(load.run())
    print(f"\n{calls} calls, {seconds:.1f} s, rss_mb {load.rss_mb}")
    assert not load.wrong, load.wrong[:5]
    assert (len(load.answered), set(load.answered.values())) == (calls, {1})
    health = requests.get(f"{service.url}/health", timeout=5).json()
    assert (health["running"], health["waiting"]) == (0, 0)
    assert health["workers"]["restarts"] >= kills
    assert sum(health["answered"].values()) == calls
    executed = metric(service, "tools_sandbox_execution_seconds_count", tool="python")
    assert executed == load.executions_due  # none was executed twice
    wait_until(lambda: service.idle() and len(service.at_work()) == family_before)
    wait_until(lambda: kinds(place) == folders_before)  # the processes of a killed worker remove its folder
    assert mounts(place) == mounts_before
    wait_until(lambda: len(namespaces(each.pid for each in service.at_work())) == before)
    # Answers of the last 4096 calls are kept for retries. A leak of 1 kB per call shows in the campaign.
    assert load.rss_mb[calls] - load.rss_mb[calls // 2] < 4.0, load.rss_mb
