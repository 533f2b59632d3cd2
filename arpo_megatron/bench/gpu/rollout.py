"""Speed of an engine: decoding against the bandwidth of memory, what exact entropies cost, and how much of a tree's
prompts the radix cache serves.

A decoding step's time is what some hundred more tokens of the same requests take, so that prompts and HTTP are not in
it. The floor is the time in which the device's memory moves what the step has to read; the rate is that of a large copy
in this process, bytes read and bytes written.
"""

import asyncio
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
from arpo_megatron.bench.gpu.journal import Figures, Part, timed
from arpo_megatron.bench.gpu.random_engines import EngineKind, RandomEngines, copies_per_s, step_bytes
from arpo_megatron.bench.pools import GROUP, new_pool, start
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

SEED = 1
LARGEST = 256
"""Requests at a time."""
ENGINE = EngineConfig(max_running_requests=LARGEST, max_total_tokens=200_000, memory_fraction=0.45)
"""Two of them fit on one GPU."""
ENTROPY_GOAL = 0.02
PREFILL_GOAL = 1.05
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests at once, each with a prompt of so many tokens."""

    requests: int
    prompt: int

    @property
    def name(self) -> str:
        """Key among a part's figures."""
        return f"{self.requests} requests, prompts of {self.prompt}"


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What is measured.

    Attributes:
        engines: that run.
        shapes: by name; the first one's engine runs with and without entropies, and grows trees.
        loads: of decoding.
        tokens: sampled of each request, in the shorter and in the longer of two generations.
        repeats: of each.
        algorithm: how trees are grown.
        tasks: trees at once.
        tool_s: latency of a tool.
    """

    engines: RandomEngines
    specs: Mapping[str, ModelSpec] = field(
        default_factory=lambda: MappingProxyType({n: KNOWN_MODELS[f"Qwen/Qwen3-{n}"] for n in ("4B", "8B")})
    )
    loads: Sequence[Load] = (Load(64, 64), Load(LARGEST, 64), Load(64, 2048), Load(16, 64), Load(1, 64))
    tokens: tuple[int, int] = (32, 416)
    repeats: int = 3
    algorithm: AlgorithmConfig = field(
        default_factory=lambda: AlgorithmConfig(group_size=16, initial_rollouts=8, entropy_tokens=4)
    )
    tasks: int = 16
    tool_s: float = 0.2


def rollout_parts(what: Rollouts) -> list[Part]:
    """In order of value."""
    (first, spec), *others = what.specs.items()
    parts = [
        Part(f"decode {first}, with and without entropies", partial(_prepare_decode, what, EngineKind(spec), True)),
        Part(f"trees {first}", partial(_prepare_trees, what, EngineKind(spec))),
    ]
    for name, other in others:
        parts += [
            Part(f"decode {name}", partial(_prepare_decode, what, EngineKind(other), False)),
            Part(f"decode {name} fp8", partial(_prepare_decode, what, EngineKind(other, quantization="fp8"), False)),
        ]
    return [
        *parts,
        Part(f"decode {first} fp8", partial(_prepare_decode, what, EngineKind(spec, quantization="fp8"), False)),
    ]


def _prepare_decode(what: Rollouts, kind: EngineKind, compare: bool) -> Callable[[], Figures]:
    what.engines.folder(kind.spec)
    kinds = [kind, EngineKind(kind.spec, entropy=False, quantization=kind.quantization)][: 2 if compare else 1]

    def measure() -> Figures:
        # Before the engines are there: they take nothing from the device while they idle, but they take memory.
        rate = 2 * copies_per_s()
        engines = what.engines.only(*kinds)
        figures: Figures = {
            "startup_s": [round(engine.startup_s, 1) for engine in engines],
            "copy_gb_per_s": round(rate / 1e9, 1),
        }
        for load in what.loads:
            prompts = _prompts(kind.spec, load)
            for engine in engines:
                _generate(engine.url, prompts, 1)  # its prompts are cached from now on
            steps: list[list[float]] = [[] for _ in engines]
            for _ in range(what.repeats):
                for engine, found in zip(engines, steps, strict=True):  # in turn: clocks and caches drift
                    short, long = (_generate(engine.url, prompts, tokens) for tokens in what.tokens)
                    found.append((long - short) / (what.tokens[1] - what.tokens[0]))
            figures[load.name] = _decode_figures(what, kind, load, rate, steps)
        return figures

    return measure


def _decode_figures(what: Rollouts, kind: EngineKind, load: Load, rate: float, steps: list[list[float]]) -> Figures:
    """Of the first engine's steps, in seconds; a second one has no entropies."""
    step = median(steps[0])
    value = 2 if what.engines.dtype == "bfloat16" else 4
    read = step_bytes(
        kind.spec,
        requests=load.requests,
        context=load.prompt + sum(what.tokens) // 2,
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
        # Of pairs, one behind the other: what drifts is in both.
        costs = [with_it / without - 1 for with_it, without in zip(*steps, strict=True)]
        figures["entropy_cost"] = round(median(costs), 4)
        figures["entropy_costs"] = [round(cost, 4) for cost in costs]
        figures["goal"] = ENTROPY_GOAL
    return figures


def _prompts(spec: ModelSpec, load: Load) -> list[list[int]]:
    rng = np.random.default_rng([load.requests, load.prompt])
    prompts: list[list[int]] = rng.integers(3, spec.vocabulary, (load.requests, load.prompt)).tolist()
    return prompts


def _generate(url: str, prompts: list[list[int]], tokens: int) -> float:
    """Seconds until all have sampled so many."""
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
    }
    started = perf_counter()
    answer = requests.post(f"{url}/generate", json=body, timeout=_TIMEOUT_S)
    seconds = perf_counter() - started
    answer.raise_for_status()
    if any(len(each["output_ids"]) != tokens for each in answer.json()):
        raise RuntimeError(f"the engine did not sample {tokens} tokens of each request")
    return seconds


def _entropy_s(rows: int, vocabulary: int) -> tuple[float, float]:
    """Seconds of what the plug-in computes in a step, while nothing else runs; and if torch's operations did it."""
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


def _prepare_trees(what: Rollouts, kind: EngineKind) -> Callable[[], Figures]:
    folder = what.engines.folder(kind.spec)
    codec = TokenizerCodec(folder)
    # Their first words are different: no two tasks share a beginning.
    texts = ["".join(f" w{(97 * task + place) % 1000}" for place in range(300)) for task in range(what.tasks)]
    tasks = [Task(f"task {number}", (), "", "math", text) for number, text in enumerate(texts)]

    def measure() -> Figures:
        (engine,) = what.engines.only(kind)
        requests.post(f"{engine.url}/flush_cache", timeout=_TIMEOUT_S).raise_for_status()
        report = asyncio.run(_grow(what, engine.url, codec, tasks))
        stats = report.stats
        return {
            "trees": stats.trees,
            "failed": stats.failed,
            "trajectories": stats.trajectories,
            "forks": stats.forks,
            "seconds_of_growing": round(stats.seconds, 2),
            "tokens_per_s": round(stats.counts.tokens_sampled / stats.seconds),
            "unique_over_flat": round(stats.unique_tokens / max(1, stats.flat_tokens), 4),
            "prefill_over_unique": round(stats.prefill_over_unique, 4),
            "goal": PREFILL_GOAL,
            "cached_share": round(stats.cached_share, 4),
            "predicted_cached_share": round(stats.predicted_cached_share, 4),
        }

    return measure


async def _grow(what: Rollouts, url: str, codec: TokenizerCodec, tasks: Sequence[Task]) -> RolloutReport:
    """A tree for each task, all at once, as in a step of a job."""
    policy = make_branch_policy(what.algorithm, vocabulary_size=codec.vocabulary_size, seed=SEED)
    tools = SimulatedTools(what.tool_s, LATENCIES["constant"])
    settings = RolloutSettings(what.algorithm, what.algorithm.group_size, Sampling(), LIMITS)
    async with EngineClient(url) as engine:
        pool = new_pool(engine, tools, codec, policy, SEED)
        pool.start(start(tasks, step=0, version=0, settings=settings))
        report = await pool.collect(CollectTrees(GROUP))
        await pool.close()
    return report
