"""Rollouts whose paths together need three times the engine's KV pool: admission against independent coroutines.

Both ways grow the same trees of the same tasks on one real engine, a step at a time, and every step begins with an
empty cache. The baseline sends every request at once, so the engine runs them first in, first out; its fork decisions
take a request of their own. Steps of both alternate, so other load on the machine slows both.
"""

import asyncio
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from arpo_megatron.algorithms.branching import make_branch_policy
from arpo_megatron.bench.pools import PURPOSE, new_pool, start
from arpo_megatron.bench.simulated_tools import LATENCIES, SimulatedTools
from arpo_megatron.bench.tool_calling_model import write_model
from arpo_megatron.config import AlgorithmConfig, EngineConfig
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.launch import launch_engine
from arpo_megatron.engine.request import Sampling
from arpo_megatron.engine.version import streams_entropies
from arpo_megatron.rollout.admission_gate import AdmissionGate
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.messages import CollectTrees, RolloutReport, RolloutSettings
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tasks.base import Task

ALGORITHM = AlgorithmConfig(group_size=8, initial_rollouts=4, entropy_tokens=4)
TASKS = 8
STEPS = 3
POOL_SHARE = 3
"""The KV pool holds one part in this many of a step's tokens."""
PROMPT_WORDS, RESULT_WORDS = 200, 120
ENGINE = EngineConfig(max_running_requests=32, max_total_tokens=2**17, memory_fraction=0.1)
LIMITS = RolloutLimits(
    max_length=2048, max_response_tokens=1800, max_tool_calls=6, max_tool_tokens=RESULT_WORDS + 8, tool_timeout_s=600.0
)
TOOL_S = 1.0
"""Mean latency of a tool."""
SEED = 1


@dataclass(slots=True)
class PressureRun:
    """Totals of one way over all steps."""

    seconds: float = 0.0
    tokens: int = 0
    """Sampled tokens."""
    requests: int = 0
    computed: int = 0
    """Prompt tokens that the engine computed."""
    given: int = 0
    """Tokens of prompts and tool results, each once."""
    suspended: int = 0
    """How often a path had to wait in its middle."""
    margin: float = 0.0
    """Share of the pool that admission used in the end."""

    def add(self, report: RolloutReport, seconds: float) -> None:
        """Add a step."""
        if report.failed:
            raise RuntimeError(f"a tree failed: {report.failed[0].reason}")
        counts = report.stats.counts
        self.seconds += seconds
        self.tokens += counts.tokens_sampled
        self.requests += counts.requests
        self.computed += counts.prefilled_tokens
        self.given += report.stats.given_tokens


def bench_pressure(*, progress: bool) -> dict[str, Any]:
    """Measure both ways on a real engine with a small KV pool."""
    with tempfile.TemporaryDirectory(prefix="arpo-bench-pressure-") as folder:
        model = Path(folder) / "model"
        write_model(model)
        log = Path(folder) / "engine.log"
        codec = TokenizerCodec(model)
        with launch_engine(model, ENGINE, dtype="float32", seed=SEED, log_path=log) as engine:
            need = asyncio.run(_step(engine.url, codec, 0, admitted=True))[0].stats.unique_tokens
        small = replace(ENGINE, max_total_tokens=need // POOL_SHARE)
        with launch_engine(model, small, dtype="float32", seed=SEED, log_path=log) as engine:
            runs = asyncio.run(_alternate(engine.url, codec, STEPS, progress=progress))
    free, held = runs["independent"], runs["admission"]
    return {
        "speedup_pressure": (held.tokens / held.seconds) / (free.tokens / free.seconds),
        "reprefill_pressure": held.computed / held.given,
        "reprefill_pressure_baseline": free.computed / free.given,
        "pool_tokens": need // POOL_SHARE,
        "step_tokens": need,
        "runs": {name: asdict(run) for name, run in runs.items()},
    }


async def _alternate(url: str, codec: TokenizerCodec, steps: int, *, progress: bool) -> dict[str, PressureRun]:
    runs = {"independent": PressureRun(), "admission": PressureRun()}
    for step in range(1, steps + 1):
        for name, run in runs.items():
            began = time.monotonic()
            report, gate = await _step(url, codec, step, admitted=name == "admission")
            run.add(report, time.monotonic() - began)
            if gate is not None:
                run.suspended, run.margin = run.suspended + gate.figures().suspended, gate.figures().margin
            if progress:
                print(f"pressure, step {step}, {name}: {asdict(run)}", file=sys.stderr)
    return runs


async def _step(
    url: str, codec: TokenizerCodec, step: int, *, admitted: bool
) -> tuple[RolloutReport, AdmissionGate | None]:
    """Grow the trees of one step from an empty cache."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/flush_cache") as flushed:
        flushed.raise_for_status()
    policy = make_branch_policy(ALGORITHM, vocabulary_size=codec.vocabulary_size, seed=SEED)
    tools = SimulatedTools(TOOL_S, LATENCIES["lognormal"], " ".join(f"w{n}" for n in range(RESULT_WORDS)))
    settings = RolloutSettings(ALGORITHM, ALGORITHM.group_size, Sampling(), LIMITS)
    async with EngineClient(url, streams=admitted and streams_entropies()) as client, AdmissionGate(client) as gate:
        pool = new_pool(client, tools, codec, policy, SEED, gate if admitted else None)
        pool.start(start([_task(step, n) for n in range(TASKS)], step=step, version=0, settings=settings))
        try:
            return await pool.collect(CollectTrees(PURPOSE)), gate if admitted else None
        finally:
            await pool.close()


def _task(step: int, number: int) -> Task:
    place = TASKS * step + number
    words = "".join(f" w{(7 * place + 13 * index) % 880}" for index in range(PROMPT_WORDS))
    return Task(f"task {place}", (), "", "math", words)
