"""Cost of the rollout controller at scale: a whole pool of trees against two stub engines over HTTP.

Trees, forks, the parsing of calls, decisions, admission, HTTP, records and accounting are real. The engines answer
without a model (`stub_engine`), and a share of their requests fails on purpose. Tools sleep in this process, so HTTP to
the tool service is left out. So are the sending of records to the trainer and its memory for them.
"""

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from arpo_megatron.algorithms.branching import make_branch_policy
from arpo_megatron.bench.memory import highest, resident
from arpo_megatron.bench.pools import PURPOSE, new_pool, start
from arpo_megatron.bench.simulated_tools import LATENCIES, SimulatedTools
from arpo_megatron.bench.stub_engine import FAILURES, StubSettings, launch_stub
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.request import Sampling
from arpo_megatron.rollout.admission_gate import AdmissionGate
from arpo_megatron.rollout.garbage import collect_on_demand
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.messages import CollectTrees, RolloutReport, RolloutSettings
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Role
from arpo_megatron.utils.processes import raise_file_limit

TREES = (512, 2048)
ENGINES = 2
ALGORITHM = AlgorithmConfig(group_size=16, initial_rollouts=8, entropy_tokens=4)
LIMITS = RolloutLimits(
    max_length=2048, max_response_tokens=1024, max_tool_calls=3, max_tool_tokens=32, tool_timeout_s=600.0
)
TOOL_S = 0.5
FAILURE_SHARE = 0.01
"""Share of the requests with each kind of failure."""
DEADLINE_S = 20.0
"""Deadline of a request: those that hang are repeated after it."""
BLOCKED_S = 0.05
"""A callback that takes longer blocks the event loop."""


@dataclass(frozen=True, slots=True)
class ControllerRun:
    """Work and costs of the controller for one number of trees. CPU time and memory are those of its process."""

    trees: int
    finished: int
    trajectories: int
    segments: int
    """Number of MODEL segments."""
    requests: int
    """Requests that reached the engines."""
    failed: int
    """Requests that the engines let fail, and those that took longer than `DEADLINE_S`."""
    bytes_per_request: float
    """Mean size of a request's body."""
    seconds: float
    cpu_ms_per_segment: float
    blocked: int
    """Callbacks of the event loop that take more than `BLOCKED_S` of CPU time."""
    longest_callback_ms: float
    """CPU time of the longest callback. Engines and controller share the machine, so wall time is not its own."""
    longest_wait_ms: float
    """Longest time without CPU of a callback that gave the CPU up itself: it slept, or waited for a lock or a file."""
    peak_gb: float
    """Peak memory in 10^9 bytes."""
    kb_per_trajectory: float
    """Memory over that before the trees' start, at the peak, in 1000 bytes."""
    lost: tuple[str, ...]
    """Why trees could not be finished."""


def bench_controller(model: Path, sizes: Sequence[int] = (), failure_share: float = FAILURE_SHARE) -> dict[str, Any]:
    """Measure each number of trees, or `TREES`, in a separate process with its own peak memory."""
    rows = []
    for size in sizes or TREES:
        arguments = [sys.executable, "-m", __name__, str(model), str(size), str(failure_share)]
        done = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"controller with stub engines: {rows[-1]}", file=sys.stderr)
    first, last = rows[0], rows[-1]
    return {
        "engines": f"{ENGINES} stub engines over HTTP",
        "tools": "simulated in the process",
        "failures": f"{failure_share:.1%} of each of {', '.join(FAILURES)}",
        "sizes": rows,
        "cpu_ms_per_segment": last["cpu_ms_per_segment"],
        "growth": last["cpu_ms_per_segment"] / first["cpu_ms_per_segment"],
        "longest_callback_ms": max(row["longest_callback_ms"] for row in rows),
        "kb_per_trajectory": last["kb_per_trajectory"],
        "peak_gb": last["peak_gb"],
        "lost": sum(row["trees"] - row["finished"] for row in rows),
    }


async def run_controller(model: Path, trees: int, failure_share: float, **settings: Any) -> ControllerRun:
    """Grow trees against stub engines.

    Args:
        model: directory of the tokenizer.
        trees: their number.
        failure_share: share of the requests with each kind of failure.
        settings: fields of `StubSettings`.
    """
    codec = TokenizerCodec(model)
    policy = make_branch_policy(ALGORITHM, vocabulary_size=codec.vocabulary_size, seed=1)
    tasks = tuple(Task(f"task {n}", (), "", "math", f" w{n % 800} w{n // 800} w2") for n in range(trees))
    rollout = RolloutSettings(ALGORITHM, ALGORITHM.group_size, Sampling(), LIMITS)
    stub = StubSettings(call=codec.vocabulary_size - 1, failure_share=failure_share, **settings)
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(launch_stub(StubSettings(**{**asdict(stub), "seed": n}))) for n in range(ENGINES)]
        callbacks = stack.enter_context(timed_callbacks())
        async with (
            EngineClient(*urls, streams=True, request_timeout_s=DEADLINE_S) as client,
            AdmissionGate(client, codec) as gate,
        ):
            tools = SimulatedTools(TOOL_S, LATENCIES["lognormal"])
            pool = new_pool(client, tools, codec, policy, 1, gate)
            memory, before, began = resident(), time.process_time(), time.monotonic()
            await pool.start(start(tasks, step=0, version=0, settings=rollout))
            report = await pool.collect(CollectTrees(PURPOSE))
            cpu_s, seconds = time.process_time() - before, time.monotonic() - began
            memory = highest() - memory
            await pool.close()
        counts = await _counts(urls)
        counts["hang"] = client.retries["timeout"]  # on a busy machine more than those that hang
    return _row(report, counts, seconds=seconds, cpu_s=cpu_s, callbacks=callbacks, memory=memory, trees=trees)


def _row(
    report: RolloutReport,
    counts: Counter[str],
    *,
    seconds: float,
    cpu_s: float,
    callbacks: "Callbacks",
    memory: int,
    trees: int,
) -> ControllerRun:
    trajectories = sum(len(tree.leaves()) for tree in report.trees)
    segments = sum(segment.role is Role.MODEL for tree in report.trees for segment in tree.segments)
    return ControllerRun(
        trees=trees,
        finished=len(report.trees),
        trajectories=trajectories,
        segments=segments,
        requests=counts["requests"],
        failed=sum(counts[kind] for kind in FAILURES),
        bytes_per_request=counts["bytes"] / counts["requests"],
        seconds=seconds,
        cpu_ms_per_segment=1e3 * cpu_s / max(1, segments),
        blocked=sum(each > BLOCKED_S for each in callbacks.long),
        longest_callback_ms=1e3 * max(callbacks.long, default=0.0),
        longest_wait_ms=1e3 * callbacks.longest_wait_s,
        peak_gb=highest() / 1e9,
        kb_per_trajectory=memory / 1e3 / max(1, trajectories),
        lost=tuple(sorted({failed.reason for failed in report.failed})),
    )


@dataclass(slots=True)
class Callbacks:
    """Times of the event loop's callbacks."""

    long: list[float] = field(default_factory=list)
    """CPU seconds of those that take more than a millisecond of it."""
    longest_wait_s: float = 0.0


@contextlib.contextmanager
def timed_callbacks() -> Iterator[Callbacks]:
    """Time the callbacks of the event loop that begin within the block.

    A process that waits for a CPU loses it involuntarily, so other load adds to no wait of its own.
    """
    run, found = asyncio.Handle._run, Callbacks()

    def timed(handle: asyncio.Handle) -> None:
        began, before, given_up = time.monotonic(), time.thread_time(), _times_given_up()
        run(handle)
        if (took := time.thread_time() - before) > 1e-3:
            found.long.append(took)
        if _times_given_up() > given_up:
            found.longest_wait_s = max(found.longest_wait_s, time.monotonic() - began - took)

    setattr(asyncio.Handle, "_run", timed)  # noqa: B010  (the loop has no hook for it)
    try:
        yield found
    finally:
        setattr(asyncio.Handle, "_run", run)  # noqa: B010


def _times_given_up() -> int:
    """Return how often this thread gave the CPU up itself."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


async def _counts(urls: Sequence[str]) -> Counter[str]:
    total = Counter[str]()
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.get(f"{url}/counts") as response:
                total.update(await response.json())
    return total


if __name__ == "__main__":
    raise_file_limit()
    collect_on_demand()
    path, size, share = sys.argv[1:]
    print(json.dumps(asdict(asyncio.run(run_controller(Path(path), int(size), float(share))))))
