"""Weight pushes from a trainer into an engine on the same GPU (CUDA IPC), and lending the engine's memory.

A push is timed from closing the engine's gate to opening it again, without the probe that follows. It is compared with
a bare copy of the same bytes within the device's memory, measured in the same process. A push needs at least two
copies: into the buffer that the engine maps, and from there into its parameters.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from gc import collect
from math import nan
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch

from arpo_megatron.actor import parallel
from arpo_megatron.actor.model import DTYPES, TreeGPTModel, build_chunks
from arpo_megatron.bench.gpu.measure import Figures, Measurements, reset_peak, synchronize, used_bytes
from arpo_megatron.bench.gpu.random_engines import DUMMY, RandomEngines, copies_per_s, first_gpu
from arpo_megatron.bench.sync import trainer_logprobs
from arpo_megatron.config import EngineConfig, ParallelConfig, SyncConfig
from arpo_megatron.engine.admin import EngineAdmin, EngineEndpoint
from arpo_megatron.engine.launch import EngineHandle, launch_engine
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.trainer.push import probe_pack
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.sync import LONG_PROBE_TOKENS, TIMEOUT_S, PushSettings, WeightSync, probe_gap

PUSH_GOAL = 0.6
ENGINE = EngineConfig(max_running_requests=64, max_total_tokens=100_000)
"""Sizes as in a job whose engine shares the trainer's GPU."""
BUCKETS_MIB = (SyncConfig().bucket_mib, 1024, 4096)
Quantization = Literal["none", "fp8"]


class TimedEngineAdmin(EngineAdmin):
    """Requests to an engine, with their seconds by kind since `clear`."""

    def __init__(self, url: str) -> None:
        super().__init__([url], TIMEOUT_S)
        self.seconds: dict[str, float] = {}

    def clear(self) -> None:
        """Discard the seconds measured so far."""
        self.seconds = {}

    def begin_push(self, version: int) -> tuple[EngineEndpoint, ...]:
        """Close the engine's gate, timed as "begin"."""
        with self._timed("begin"):
            return super().begin_push(version)

    def commit_push(self, version: int, loads: int) -> None:
        """Open the engine's gate, timed as "commit"."""
        with self._timed("commit"):
            super().commit_push(version, loads)

    def _post(self, url: str, endpoint: str, body: Mapping[str, Any]) -> Any:
        if not endpoint.startswith("update_weights"):
            return super()._post(url, endpoint, body)
        with self._timed("load"):  # the whole exchange
            return super()._post(url, endpoint, body)

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        started = perf_counter()
        yield
        self.seconds[kind] = self.seconds.get(kind, 0.0) + perf_counter() - started


@dataclass(frozen=True, slots=True)
class TimedPush:
    """Duration, size and verification of one push."""

    s: float
    """Seconds without the probe."""
    bytes: int
    verified: int
    """Tensors whose checksums were compared."""
    seconds: dict[str, float]
    """Seconds spent waiting for the engine, by kind of request; `load` is the whole exchange."""
    gap: float
    """Largest difference of log-probs between trainer and engine in nats; NaN without a probe."""


@dataclass(slots=True)
class Pair:
    """A trainer's model with random weights, and the engine on the same GPU that it is pushed into."""

    chunks: list[TreeGPTModel]
    spec: ModelSpec
    engine: EngineHandle
    admin: TimedEngineAdmin
    quantization: Quantization
    """How the engine holds weights."""
    sync: WeightSync | None = None
    """The trainer's end of pushes, with `admin` for its requests."""
    bucket_bytes: int = 0
    """Size of its buckets."""
    version: int = 0
    """Version of the last push."""

    def push(self, bucket_bytes: int, *, probe: bool = False) -> TimedPush:
        """Push the weights; with `probe`, compare log-probs afterwards."""
        self.version += 1
        sync = self._with_buckets(bucket_bytes)
        self.admin.clear()
        synchronize()
        report = sync.push(self.version)
        seconds, gap = self.admin.seconds, nan
        if probe:
            tokens = list(range(LONG_PROBE_TOKENS))
            logprobs = self.admin.start_logprobs(tokens)
            own = trainer_logprobs(self.chunks[0], probe_pack(tokens))
            gap = probe_gap(own.float().cpu().numpy(), logprobs()[0])
        return TimedPush(report.seconds, report.bytes, len(report.verified), seconds, gap)

    def close(self) -> None:
        """Close the trainer's end of the pushes, then stop the engine."""
        if self.sync is not None:
            self.sync.close()
        self.engine.stop()

    def _with_buckets(self, bucket_bytes: int) -> WeightSync:
        if self.sync is None or self.bucket_bytes != bucket_bytes:
            if self.sync is not None:
                self.sync.close()
            settings = PushSettings("ipc", bucket_bytes, verify_every=0, fp8=self.quantization == "fp8")
            self.admin, self.bucket_bytes = TimedEngineAdmin(self.engine.url), bucket_bytes
            self.sync = WeightSync(Control(None), self.admin, self.chunks, self.spec, settings)
        return self.sync


@dataclass(slots=True)
class PushBench:
    """Models and bucket sizes; one trainer with its engine runs at a time."""

    engines: RandomEngines
    """Source of the models' directories, the engines' sizes and logs."""
    spec: ModelSpec = KNOWN_MODELS["Qwen/Qwen3-4B"]
    buckets_mib: tuple[int, ...] = BUCKETS_MIB
    """Values of `sync.bucket_mib`, the default first."""
    repeats: int = 5
    """Pushes of each size, and rounds of lending memory."""
    _pair: Pair | None = None
    _quantization: Quantization | None = None

    def pair(self, quantization: Quantization) -> Pair:
        """Return the trainer whose engine has such weights, and stop the other one."""
        if self._pair is None or self._quantization != quantization:
            self.close()
            self._pair, self._quantization = self._start(quantization), quantization
        return self._pair

    def close(self) -> None:
        """Stop the engine and free the model."""
        if self._pair is not None:
            self._pair.close()
            self._pair = None
            collect()
            reset_peak()

    def _start(self, quantization: Quantization) -> Pair:
        layout, engines = ParallelConfig(), self.engines
        if not torch.distributed.is_initialized():
            parallel.initialize(layout, seed=1)
        chunks = build_chunks(self.spec, layout, DTYPES[engines.dtype])
        collect()
        reset_peak()  # the engine sizes its pool by the free memory
        engine = launch_engine(
            engines.folder(self.spec),
            replace(engines.sizes, quantization=quantization),
            dtype=engines.dtype,
            seed=1,
            log_path=engines.logs / "engines.log",
            placement=first_gpu(colocated=True),
            options=DUMMY,
        )
        admin = TimedEngineAdmin(engine.url)
        return Pair(chunks, self.spec, engine, admin, quantization)

    def measure_push(self, quantization: Quantization) -> Figures:
        """Measure pushes with each bucket size."""
        copied = copies_per_s()
        pair = self.pair(quantization)
        # The first push is verified with checksums.
        first = pair.push(_bytes(self.buckets_mib[0]), probe=True)
        figures: Figures = {
            "engine_startup_s": round(pair.engine.startup_s, 1),
            "gb": round(first.bytes / 1e9, 3),
            "copy_gb_per_s": round(copied / 1e9, 1),
            "goal": PUSH_GOAL,
            "first_s": round(first.s, 3),
            "first_probe_gap": first.gap,
            "tensors_verified": first.verified,
        }
        for size in self.buckets_mib:
            pair.push(_bytes(size))  # allocates the buffers
            pushes = [pair.push(_bytes(size)) for _ in range(self.repeats)]
            push_s = median(push.s for push in pushes)
            middle = min(pushes, key=lambda push: abs(push.s - push_s))
            figures[f"buckets of {size} MiB"] = {
                "push_s": [round(push.s, 4) for push in pushes],
                "gb_per_s": round(first.bytes / push_s / 1e9, 2),
                "share_of_copy": round(first.bytes / copied / push_s, 4),
                "share_of_two_copies": round(2 * first.bytes / copied / push_s, 4),
                "of_it_s": {kind: round(seconds, 4) for kind, seconds in middle.seconds.items()},
            }
        last = pair.push(_bytes(self.buckets_mib[0]), probe=True)
        return {**figures, "probe_gap": last.gap}

    def measure_memory(self, quantization: Quantization) -> Figures:
        """Measure lending the engine's memory, taking it back, and the push that must follow."""
        pair = self.pair(quantization)
        pair.push(_bytes(self.buckets_mib[0]))
        release_s, resume_s, freed, pushes = [], [], [], []
        for _ in range(self.repeats):
            before = used_bytes()
            release_s.append(_seconds(pair.admin.release_memory))
            freed.append(before - used_bytes())
            resume_s.append(_seconds(pair.admin.resume_memory))
            pushes.append(pair.push(_bytes(self.buckets_mib[0]), probe=True))  # restores the weights
        return {
            "release_s": [round(seconds, 4) for seconds in release_s],
            "resume_s": [round(seconds, 4) for seconds in resume_s],
            "freed_gib": round(median(freed) / 2**30, 2),
            "push_after_s": [round(push.s, 4) for push in pushes],
            "probe_gap_after": max(push.gap for push in pushes),
        }


def push_measurements(bench: PushBench) -> Measurements:
    """Return the measurements, the most important ones first."""
    return {
        f"push {bench.engines.dtype}": partial(bench.measure_push, "none"),
        f"memory {bench.engines.dtype}": partial(bench.measure_memory, "none"),
        "push fp8": partial(bench.measure_push, "fp8"),
        "memory fp8": partial(bench.measure_memory, "fp8"),
    }


def _seconds(work: Callable[[], None]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def _bytes(bucket_mib: int) -> int:
    return SyncConfig(bucket_mib=bucket_mib).bucket_bytes
