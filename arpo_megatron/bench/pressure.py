"""Rollouts whose paths together need three times the engine's KV pool: admission against independent coroutines.

Both ways grow the same trees of the same tasks on one real engine, a step at a time, and every step begins with an
empty cache. The baseline sends every request at once, so the engine runs them first in, first out; its fork decisions
take a request of their own. Steps of both alternate, so other load on the machine slows both.

A tool takes a given share of the time in which the engine computes its whole pool, measured first. If tools took longer
than that, admission would not keep their paths' KV: it would be cheaper to compute it again (`rollout.admission`).
"""

import math
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
from arpo_megatron.utils.signals import run_in_loop

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
TOOL_SHARE = 0.2
"""Mean latency of a tool over the time in which the engine computes its pool. An 8B engine that computes 30,000 tokens
per second has it with a pool of 340,000 tokens and tools of 2 s."""
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
    recomputed: int = 0
    """Tokens among them that were computed for the same path before; only admission counts them."""
    suspended: int = 0
    """How often a path had to wait in its middle."""
    released: int = 0
    """How often a path gave its room away while it waited for a tool."""
    margin: float = 0.0
    """Share of the pool that admission used in the end."""

    def add(self, report: RolloutReport, seconds: float) -> None:
        """Add the counts of a step's report. Raises RuntimeError if a tree failed."""
        if report.failed:
            raise RuntimeError(f"a tree failed: {report.failed[0].reason}")
        counts = report.stats.counts
        self.seconds += seconds
        self.tokens += counts.tokens_sampled
        self.requests += counts.requests
        self.computed += counts.prefilled_tokens
        self.given += report.stats.totals.given_tokens
        self.suspended += counts.suspended
        self.recomputed += counts.tokens_recomputed


def bench_pressure(*, progress: bool) -> dict[str, Any]:
    """Measure both ways on a real engine with a small KV pool."""
    with tempfile.TemporaryDirectory(prefix="arpo-bench-pressure-") as folder:
        model = Path(folder) / "model"
        write_model(model)
        log = Path(folder) / "engine.log"
        codec = TokenizerCodec(model)
        with launch_engine(model, ENGINE, dtype="float32", seed=SEED, log_path=log) as engine:
            need = run_in_loop(_need(engine.url, codec))
        small = replace(ENGINE, max_total_tokens=need // POOL_SHARE)
        with launch_engine(model, small, dtype="float32", seed=SEED, log_path=log) as engine:
            tool_s, runs = run_in_loop(_alternate(engine.url, codec, progress=progress))
    free, held = runs["independent"], runs["admission"]
    return {
        "speedup_pressure": (held.tokens / held.seconds) / (free.tokens / free.seconds),
        "reprefill_pressure": held.computed / held.given,
        "reprefill_pressure_baseline": free.computed / free.given,
        "pool_tokens": need // POOL_SHARE,
        "step_tokens": need,
        "tool_s": tool_s,
        "runs": {name: asdict(run) for name, run in runs.items()},
    }


async def _need(url: str, codec: TokenizerCodec) -> int:
    async with EngineClient(url) as client:
        return (await _step(client, codec, 0, 0.0, None)).stats.totals.unique_tokens


async def _alternate(url: str, codec: TokenizerCodec, *, progress: bool) -> tuple[float, dict[str, PressureRun]]:
    """Run steps of both ways in turn; return the mean latency of the tools, and the totals of each way."""
    free, held = PressureRun(), PressureRun()
    streams = streams_entropies()
    async with (
        EngineClient(url) as plain,
        EngineClient(url, streams=streams) as client,
        AdmissionGate(client, codec) as gate,
    ):
        await gate.opened()
        tool_s = TOOL_SHARE * gate.admission.patience_s
        if not math.isfinite(tool_s):
            raise RuntimeError("the time of a prefill could not be measured; run the benchmark again")
        for step in range(1, STEPS + 1):
            for run, engine, admission in ((free, plain, None), (held, client, gate)):
                began = time.monotonic()
                gate.flushed()
                report = await _step(engine, codec, step, tool_s, admission)
                run.add(report, time.monotonic() - began)
                if progress:
                    name = "independent" if admission is None else "admission"
                    print(f"pressure, step {step}, {name}: {asdict(run)}", file=sys.stderr)
        held.margin, held.released = gate.figures().margin, gate.figures().released
    return tool_s, {"independent": free, "admission": held}


async def _step(
    client: EngineClient, codec: TokenizerCodec, step: int, tool_s: float, admission: AdmissionGate | None
) -> RolloutReport:
    """Grow the trees of one step from an empty cache."""
    await client.pause()
    client.resume(0)
    policy = make_branch_policy(ALGORITHM, vocabulary_size=codec.vocabulary_size, seed=SEED)
    tools = SimulatedTools(tool_s, LATENCIES["lognormal"], " ".join(f"w{n}" for n in range(RESULT_WORDS)))
    settings = RolloutSettings(ALGORITHM, ALGORITHM.group_size, Sampling(), LIMITS)
    pool = new_pool(client, tools, codec, policy, SEED, admission)
    await pool.start(start([_task(step, n) for n in range(TASKS)], step=step, version=0, settings=settings))
    try:
        return await pool.collect(CollectTrees(PURPOSE))
    finally:
        await pool.close()


def _task(step: int, number: int) -> Task:
    place = TASKS * step + number
    words = "".join(f" w{(7 * place + 13 * index) % 880}" for index in range(PROMPT_WORDS))
    return Task(f"task {place}", (), "", "math", words)
