"""Speed-up of the tree pool over a batch-synchronous loop, on one engine with slow tools.

The engine is real and its model is tiny and random: single tokens of its vocabulary are whole tool calls, so segments
have geometric lengths. Tools sleep and answer a constant. Their mean latency is the mean time of a segment in a full
batch, so tools and decoding have equal weight. Trees have the admission and the streamed entropies of a job; rounds do
without. Each schedule runs the same steps of the same tasks. Every step gives the engine a new policy version and an
empty cache, as a weight push does. Speed-ups are ratios of sampled tokens per second.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from arpo_megatron.algorithms.branching import make_branch_policy
from arpo_megatron.bench.batch_synchronous import grow_in_rounds
from arpo_megatron.bench.client_cost import client_ms
from arpo_megatron.bench.controller import bench_controller
from arpo_megatron.bench.pools import PURPOSE, new_pool, start
from arpo_megatron.bench.pressure import bench_pressure
from arpo_megatron.bench.simulated_tools import LATENCIES, SimulatedTools
from arpo_megatron.bench.tool_calling_model import write_model
from arpo_megatron.config import AlgorithmConfig, EngineConfig, JobConfig, RolloutConfig, TrainConfig
from arpo_megatron.engine.affinity import EngineState
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.exchange import FirstTokensListener
from arpo_megatron.engine.launch import launch_engine
from arpo_megatron.engine.request import Sampling
from arpo_megatron.engine.version import streams_entropies
from arpo_megatron.rollout.admission_gate import AdmissionGate
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.messages import RolloutReport, RolloutSettings
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.tags.calls import STOP_STRINGS
from arpo_megatron.trainer.collector import collect_request
from arpo_megatron.tree import Role, RolloutTree
from arpo_megatron.utils.signals import run_in_loop

ALGORITHM = AlgorithmConfig(group_size=8, initial_rollouts=4, entropy_tokens=4)
TASKS = 8
"""Tasks per step; their M trajectories each fill the engine's batch."""
BATCH = TASKS * ALGORITHM.group_size
ENGINE = EngineConfig(max_running_requests=BATCH, max_total_tokens=2**17, memory_fraction=0.1)
LIMITS = RolloutLimits(
    max_length=2048, max_response_tokens=1024, max_tool_calls=6, max_tool_tokens=32, tool_timeout_s=600.0
)
"""Limits with the number of calls of the deep-search recipes, whose tools are slow."""
STEPS = 6
SEED = 1


@dataclass(slots=True)
class Run:
    """Totals of a schedule over all steps."""

    seconds: float = 0.0
    """Wall time."""
    tokens: int = 0
    """Sampled tokens."""
    trajectories: int = 0
    segments: int = 0
    """MODEL segments."""
    requests: int = 0
    """Requests that the engine answered."""
    computed: int = 0
    """Prompt tokens that the engine computed."""
    given: int = 0
    """Tokens of prompts and tool results, which are not sampled."""
    unique: int = 0
    """Tokens of the trees."""
    floor_s: float = 0.0
    """Sum over steps of the slowest path's tool time, a lower bound for steps that start without trees in flight."""
    controller_s: float = 0.0
    """CPU time of this process."""
    busy_share: float = 0.0
    """Share of the wall time with a request in the engine."""

    def add(self, report: RolloutReport) -> None:
        """Add the counts of a report."""
        stats = report.stats
        self.tokens += stats.counts.tokens_sampled
        self.trajectories += stats.totals.trajectories
        self.requests += stats.counts.requests
        self.computed += stats.counts.prefilled_tokens
        self.given += stats.totals.given_tokens
        self.unique += stats.totals.unique_tokens
        self.segments += sum(segment.role is Role.MODEL for tree in report.trees for segment in tree.segments)
        self.floor_s += max(map(_slowest_path_s, report.trees))


class MeteredEngine(EngineClient):
    """A client that integrates the number of requests in the engine over time.

    Requests that wait for a push, for a slot or for a retry do not count.
    """

    def __init__(self, url: str, *, streams: bool = False) -> None:
        super().__init__(url, streams=streams)
        self.busy_s = self.request_s = 0.0
        self._running = 0
        self._since = time.monotonic()

    async def _exchange(
        self, engine: EngineState, body: Mapping[str, Any], key: str, first: FirstTokensListener | None = None
    ) -> dict[str, Any]:
        self._change(1)
        try:
            return await super()._exchange(engine, body, key, first)
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        now = time.monotonic()
        self.busy_s += (now - self._since) * (self._running > 0)
        self.request_s += (now - self._since) * self._running
        self._since = now
        self._running += by


class Bench:
    """Runs of all schedules on one engine."""

    def __init__(self, url: str, codec: TokenizerCodec, *, progress: bool, steps: int) -> None:
        self._url = url
        self._steps = steps
        self._codec = codec
        self._progress = progress
        self._policy = make_branch_policy(ALGORITHM, vocabulary_size=codec.vocabulary_size, seed=SEED)
        self._version = 0
        self.segment_s = 0.0

    async def calibrate(self) -> None:
        """Measure the mean time of a segment in a full batch, over three times as many segments as slots."""
        free = asyncio.Semaphore(BATCH)
        prompt = self._codec.encode(_task(0).prompt_text)

        async def segment(engine: EngineClient) -> None:
            async with free:
                await engine.generate(prompt, max_new_tokens=1024, sampling=Sampling(), stop=STOP_STRINGS)

        async with MeteredEngine(self._url) as engine:
            await asyncio.gather(*(segment(engine) for _ in range(3 * BATCH)))
            self.segment_s = engine.request_s / (3 * BATCH)

    async def run(self, schedule: str, latency: str) -> Run:
        """Run all steps of the schedule "rounds", "on_policy" or "partial" with tools of that latency."""
        tools = SimulatedTools(self.segment_s, LATENCIES[latency])
        found, began, cpu = Run(), time.monotonic(), time.process_time()
        in_rounds = schedule == "rounds"
        async with MeteredEngine(self._url, streams=not in_rounds and streams_entropies()) as engine:
            if in_rounds:
                await self._in_rounds(engine, tools, found)
            else:
                async with AdmissionGate(engine, self._codec) as gate:
                    await self._in_trees(engine, tools, found, gate, ahead=schedule == "partial")
            found.seconds = time.monotonic() - began
            found.controller_s = time.process_time() - cpu
            found.busy_share = engine.busy_s / found.seconds
        self.log(f"{latency}, {schedule}: {found.seconds:.1f} s, {found.tokens / found.seconds:.0f} tokens/s")
        return found

    def log(self, text: str) -> None:
        """Print to standard error if progress is on."""
        if self._progress:
            print(text, file=sys.stderr)

    async def _in_rounds(self, engine: MeteredEngine, tools: SimulatedTools, found: Run) -> None:
        for step in range(self._steps):
            await engine.pause()
            engine.resume(await self._new_version())
            made = await grow_in_rounds(
                _tasks(step),
                step=step,
                engine=engine,
                tools=tools,
                codec=self._codec,
                policy=self._policy,
                limits=LIMITS,
            )
            found.tokens += made.tokens
            found.segments += made.segments
            found.trajectories += made.trajectories

    async def _in_trees(
        self, engine: MeteredEngine, tools: SimulatedTools, found: Run, gate: AdmissionGate, *, ahead: bool
    ) -> None:
        """Start and collect trees as `TreeCollector` does, with max_staleness 1 (`ahead`) or 0."""
        config = _job(self._steps, ahead=ahead)
        pool = new_pool(engine, tools, self._codec, self._policy, SEED, gate)
        settings = RolloutSettings(ALGORITHM, ALGORITHM.group_size, Sampling(), LIMITS)
        first = self._version + 1
        started = in_flight = 0
        for step in range(self._steps):
            await pool.pause()
            version = await self._new_version()
            pool.resume(version)
            while in_flight < config.trees_in_flight(step):
                await pool.start(start(_tasks(started), step=started, version=version, settings=settings))
                started, in_flight = started + 1, in_flight + TASKS
            report = await pool.collect(collect_request(config.rollout, PURPOSE, TASKS, first + step))
            in_flight -= len(report.tree_ids)
            found.add(report)
        await pool.close()

    async def _new_version(self) -> int:
        """Set the engine's version and clear its cache as a push does, while the engine is idle."""
        self._version += 1
        async with aiohttp.ClientSession() as session:
            body = {"new_version": str(self._version), "abort_all_requests": False}
            async with session.post(f"{self._url}/update_weight_version", json=body) as answer:
                answer.raise_for_status()
        return self._version


def bench_rollout(*, full: bool, progress: bool) -> dict[str, Any]:
    """Measure schedules and latencies on a real engine, a small KV pool, and the client; `full`: everything."""
    latencies = tuple(LATENCIES) if full else ("lognormal", "heavy_tail")
    with tempfile.TemporaryDirectory(prefix="arpo-bench-rollout-") as folder:
        model = Path(folder) / "model"
        write_model(model)
        log = Path(folder) / "engine.log"
        with launch_engine(model, ENGINE, dtype="float32", seed=SEED, log_path=log) as engine:
            steps = STEPS if full else STEPS // 2
            bench = Bench(engine.url, TokenizerCodec(model), progress=progress, steps=steps)
            runs = run_in_loop(_all(bench, latencies))
        scale = {"controller": bench_controller(model)} if full else {}
    pressure = bench_pressure(progress=progress)
    return {
        **_speedups(runs),
        **{name: pressure[name] for name in ("speedup_pressure", "reprefill_pressure")},
        "client_ms_16k": client_ms(),
        "segment_s": bench.segment_s,
        **scale,
        "pressure": pressure,
        "runs": _plain(runs),
    }


async def _all(bench: Bench, latencies: Sequence[str]) -> dict[str, dict[str, Run]]:
    await bench.calibrate()  # once to warm up
    await bench.calibrate()
    bench.log(f"mean segment, and mean tool latency: {bench.segment_s:.2f} s")
    schedules = ("rounds", "on_policy", "partial")
    return {latency: {name: await bench.run(name, latency) for name in schedules} for latency in latencies}


def _speedups(runs: dict[str, dict[str, Run]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for latency, ways in runs.items():
        speed = {way: run.tokens / run.seconds for way, run in ways.items()}
        figures[f"speedup_on_policy_{latency}"] = speed["on_policy"] / speed["rounds"]
        figures[f"speedup_{latency}"] = speed["partial"] / speed["rounds"]
        figures[f"on_policy_floor_share_{latency}"] = ways["on_policy"].floor_s / ways["on_policy"].seconds
    trees = [run for ways in runs.values() for way, run in ways.items() if way != "rounds"]
    on_policy = [ways["on_policy"] for ways in runs.values()]
    figures["prefill_over_unique"] = sum(run.computed for run in on_policy) / sum(run.unique for run in on_policy)
    partial = [ways["partial"] for ways in runs.values()]
    figures["prefill_over_unique_partial"] = sum(run.computed for run in partial) / sum(run.unique for run in partial)
    figures["controller_ms_http"] = 1e3 * sum(r.controller_s for r in trees) / sum(r.segments for r in trees)
    return figures


def _plain(runs: dict[str, dict[str, Run]]) -> dict[str, Any]:
    return {latency: {way: asdict(run) for way, run in ways.items()} for latency, ways in runs.items()}


def _job(steps: int, *, ahead: bool) -> JobConfig:
    """Return a config whose schedule is used."""
    return JobConfig(
        "bench",
        train=TrainConfig(steps=steps, tasks_per_step=TASKS),
        rollout=RolloutConfig(max_staleness=int(ahead)),
    )


def _tasks(step: int) -> tuple[Task, ...]:
    return tuple(_task(TASKS * step + number) for number in range(TASKS))


def _task(number: int) -> Task:
    words = "".join(f" w{(7 * number + place) % 800}" for place in range(40))
    return Task(f"task {number}", (), "", "math", words)


def _slowest_path_s(tree: RolloutTree) -> float:
    """Return the tool seconds of the tree's slowest trajectory."""

    def seconds(path: Sequence[int]) -> float:
        return sum(tool.seconds for index in path if (tool := tree.segments[index].tool) is not None)

    return max(seconds(tree.path(leaf)) for leaf in tree.leaves())
