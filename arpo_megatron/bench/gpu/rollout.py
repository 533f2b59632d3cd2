"""Speed of an engine: decoding against memory bandwidth, the cost of exact entropies, and the radix cache on trees.

The time of a decoding step is that of a few hundred more tokens of the same requests, which excludes prompts and HTTP.
Its floor is the time for reading weights, keys and values at the rate of a large copy in this process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from types import MappingProxyType

import numpy as np
import requests
import torch

from arpo_megatron.actor import parallel
from arpo_megatron.algorithms.branching import make_branch_policy
from arpo_megatron.bench.gpu.measure import Figures, Measurements, timed
from arpo_megatron.bench.gpu.random_engines import (
    REQUEST_TIMEOUT_S,
    EngineKind,
    RandomEngines,
    copies_per_s,
    generate,
    step_bytes,
)
from arpo_megatron.bench.pools import PURPOSE, new_pool, start
from arpo_megatron.bench.rollout import LIMITS
from arpo_megatron.bench.simulated_tools import LATENCIES, SimulatedTools
from arpo_megatron.config import AlgorithmConfig, EngineConfig
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.request import Sampling
from arpo_megatron.engine.server.entropy import entropy_nats, sampled_entropy_nats
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.rollout.messages import CollectTrees, RolloutReport, RolloutSettings
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tasks.base import Task
from arpo_megatron.utils.signals import run_in_loop

SEED = 1
LARGEST = 256
"""Requests in flight."""
ENGINE = EngineConfig(max_running_requests=LARGEST, max_total_tokens=200_000, memory_fraction=0.45)
"""Two such engines fit on one GPU."""
ENTROPY_GOAL = 0.02
PREFILL_GOAL = 1.05


@dataclass(frozen=True, slots=True)
class Load:
    """A number of requests, and the length of each prompt in tokens."""

    requests: int
    prompt: int

    @property
    def name(self) -> str:
        """Key of the load's figures in the result."""
        return f"{self.requests} requests, prompts of {self.prompt}"


@dataclass(frozen=True, slots=True)
class RolloutBench:
    """Models, loads and trees of the rollout benchmark, and their engines."""

    engines: RandomEngines
    specs: Mapping[str, ModelSpec] = field(
        default_factory=lambda: MappingProxyType({n: KNOWN_MODELS[f"Qwen/Qwen3-{n}"] for n in ("4B", "8B")})
    )
    """Models by name. The first one also runs without entropies, and grows trees."""
    loads: Sequence[Load] = (Load(64, 64), Load(LARGEST, 64), Load(64, 2048), Load(16, 64), Load(1, 64))
    tokens: tuple[int, int] = (32, 416)
    """Tokens per request of the shorter and the longer generation."""
    repeats: int = 3
    """Repetitions of each generation."""
    algorithm: AlgorithmConfig = field(
        default_factory=lambda: AlgorithmConfig(group_size=16, initial_rollouts=8, entropy_tokens=4)
    )
    tasks: int = 16
    """Trees in flight."""
    tool_s: float = 0.2

    def measure_decoding(self, kind: EngineKind, *, compare: bool) -> Figures:
        """Measure each load; with `compare`, also on a second engine without entropies."""
        kinds = [kind, EngineKind(kind.spec, entropy=False, quantization=kind.quantization)][: 2 if compare else 1]
        rate = 2 * copies_per_s()  # before the engines take memory
        engines = self.engines.only(*kinds)
        figures: Figures = {
            "startup_s": [round(engine.startup_s, 1) for engine in engines],
            "copy_gb_per_s": round(rate / 1e9, 1),
        }
        for load in self.loads:
            prompts = _prompts(kind.spec, load)
            for engine in engines:
                generate(engine.url, prompts, 1)  # caches the prompts
            steps: list[list[float]] = [[] for _ in engines]
            for _ in range(self.repeats):
                for engine, found in zip(engines, steps, strict=True):  # in turn: clocks and caches drift
                    short, long = (_generate_s(engine.url, prompts, tokens) for tokens in self.tokens)
                    found.append((long - short) / (self.tokens[1] - self.tokens[0]))
            figures[load.name] = self._decoding_figures(kind, load, rate, steps)
        return figures

    def _decoding_figures(self, kind: EngineKind, load: Load, rate: float, steps: list[list[float]]) -> Figures:
        """Summarize step times in seconds, of an engine with entropies and perhaps of one without."""
        step = median(steps[0])
        value = 2 if self.engines.dtype == "bfloat16" else 4
        read = step_bytes(
            kind.spec,
            requests=load.requests,
            context=load.prompt + sum(self.tokens) // 2,
            value=value,
            product=value if kind.quantization == "none" else 1,
        )
        kernel_s, torch_s = _entropy_s(load.requests, kind.spec.vocabulary)
        figures: Figures = {
            "tokens_per_s": round(load.requests / step),
            "step_ms": round(1e3 * step, 3),
            "floor_ms": round(1e3 * read / rate, 3),
            "share_of_floor": round(read / rate / step, 3),
            "entropy_ms": round(1e3 * kernel_s, 3),
            "entropy_by_torch_ms": round(1e3 * torch_s, 3),
            "entropy_over_step": round(kernel_s / step, 4),
        }
        if len(steps) > 1:
            # Consecutive measurements are paired, so that both contain the same drift.
            costs = [with_it / without - 1 for with_it, without in zip(*steps, strict=True)]
            figures["entropy_cost"] = round(median(costs), 4)
            figures["entropy_costs"] = [round(cost, 4) for cost in costs]
            figures["goal"] = ENTROPY_GOAL
        return figures

    def measure_trees(self, kind: EngineKind) -> Figures:
        """Grow a tree for each task, all in flight together, as a step of a job does."""
        codec = TokenizerCodec(self.engines.folder(kind.spec))
        # The first words differ, so that no two tasks share a prefix.
        texts = ["".join(f" w{(97 * task + word) % 1000}" for word in range(300)) for task in range(self.tasks)]
        tasks = [Task(f"task {number}", (), "", "math", text) for number, text in enumerate(texts)]
        (engine,) = self.engines.only(kind)
        requests.post(f"{engine.url}/flush_cache", timeout=REQUEST_TIMEOUT_S).raise_for_status()
        stats = run_in_loop(self._grow(engine.url, codec, tasks)).stats
        return {
            "trees": stats.trees,
            "failed": stats.failed,
            "trajectories": stats.totals.trajectories,
            "forks": stats.totals.forks,
            "seconds_of_growing": round(stats.seconds, 2),
            "tokens_per_s": round(stats.counts.tokens_sampled / stats.seconds),
            "unique_over_flat": round(stats.totals.unique_tokens / max(1, stats.totals.flat_tokens), 4),
            "prefill_over_unique": round(stats.prefill_over_unique, 4),
            "goal": PREFILL_GOAL,
            "cached_share": round(stats.cached_share, 4),
            "predicted_cached_share": round(stats.predicted_cached_share, 4),
        }

    async def _grow(self, url: str, codec: TokenizerCodec, tasks: Sequence[Task]) -> RolloutReport:
        policy = make_branch_policy(self.algorithm, vocabulary_size=codec.vocabulary_size, seed=SEED)
        tools = SimulatedTools(self.tool_s, LATENCIES["constant"])
        settings = RolloutSettings(self.algorithm, self.algorithm.group_size, Sampling(), LIMITS)
        async with EngineClient(url) as engine:
            pool = new_pool(engine, tools, codec, policy, SEED)
            await pool.start(start(tasks, step=0, version=0, settings=settings))
            report = await pool.collect(CollectTrees(PURPOSE))
            await pool.close()
        return report


def rollout_measurements(bench: RolloutBench) -> Measurements:
    """Return the measurements, the most important ones first."""
    (first, spec), *others = bench.specs.items()
    found: dict[str, Callable[[], Figures]] = {
        f"decode {first}": partial(bench.measure_decoding, EngineKind(spec), compare=True),
        f"trees {first}": partial(bench.measure_trees, EngineKind(spec)),
    }
    for name, other in others:
        found[f"decode {name}"] = partial(bench.measure_decoding, EngineKind(other), compare=False)
    for name, other in bench.specs.items():
        kind = EngineKind(other, quantization="fp8")
        found[f"decode {name} fp8"] = partial(bench.measure_decoding, kind, compare=False)
    return found


def _prompts(spec: ModelSpec, load: Load) -> list[list[int]]:
    rng = np.random.default_rng([load.requests, load.prompt])
    prompts: list[list[int]] = rng.integers(3, spec.vocabulary, (load.requests, load.prompt)).tolist()
    return prompts


def _generate_s(url: str, prompts: list[list[int]], tokens: int) -> float:
    started = perf_counter()
    generate(url, prompts, tokens)
    return perf_counter() - started


def _entropy_s(rows: int, vocabulary: int) -> tuple[float, float]:
    """Return the seconds per step of the entropy plug-in alone, and those of torch operations in its place."""
    logits = torch.randn(rows, vocabulary, device=parallel.device())
    temperatures = torch.ones(rows, 1, device=logits.device)

    def seconds(entropies: Callable[[], object]) -> float:
        def several() -> None:
            for _ in range(10):
                entropies()

        several()
        return median(timed(several) for _ in range(3)) / 10

    return (
        seconds(lambda: sampled_entropy_nats(logits, temperatures)),
        seconds(lambda: entropy_nats(logits / temperatures)),
    )
