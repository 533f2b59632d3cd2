"""Weight pushes from a trainer into an engine on the same GPU (CUDA IPC), and lending the engine's memory.

The whole push counts, from closing the engine's gate to opening it again; the probe behind it does not. It is compared
with a bare copy of the same bytes within the device's memory, measured in the same process. A push cannot do with less
than two copies: into the buffer that the engine maps, and from there into its parameters.
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
from arpo_megatron.bench.gpu.journal import Figures, Part, reset_peak, synchronize
from arpo_megatron.bench.gpu.random_engines import DUMMY, RandomEngines, copies_per_s, here
from arpo_megatron.bench.sync import trainer_logprobs
from arpo_megatron.config import EngineConfig, ParallelConfig, SyncConfig
from arpo_megatron.engine.admin import EngineAdmin, EngineEndpoint
from arpo_megatron.engine.launch import EngineHandle, launch_engine
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.trainer.controller import probe_pack
from arpo_megatron.weights.export import export_hf, hf_buckets
from arpo_megatron.weights.sync import LONG_PROBE_TOKENS, TIMEOUT_S, WeightSync, probe_gap
from arpo_megatron.weights.transports import SharedMemory

PUSH_GOAL = 0.6
ENGINE = EngineConfig(max_running_requests=64, max_total_tokens=100_000)
"""As in a job whose engine shares the trainer's GPU."""
BUCKETS_MB = (SyncConfig().bucket_mb, 1024, 4096)
Quantization = Literal["none", "fp8"]


class TimedEngines(EngineAdmin):
    """Requests to an engine, with an account of what they took: seconds by endpoint since `clear`."""

    def __init__(self, url: str) -> None:
        super().__init__([url], TIMEOUT_S)
        self.seconds: dict[str, float] = {}

    def clear(self) -> None:
        """Begin anew."""
        self.seconds = {}

    def begin_push(self, version: int) -> tuple[EngineEndpoint, ...]:
        """As `EngineAdmin` does it."""
        with self._timed("begin"):
            return super().begin_push(version)

    def commit_push(self, version: int, loads: int) -> None:
        """As `EngineAdmin` does it."""
        with self._timed("commit"):
            super().commit_push(version, loads)

    def _post(self, url: str, endpoint: str, body: Mapping[str, Any]) -> Any:
        if not endpoint.startswith("update_weights"):
            return super()._post(url, endpoint, body)
        with self._timed("load"):  # one bucket at a time
            return super()._post(url, endpoint, body)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + perf_counter() - started


@dataclass(frozen=True, slots=True)
class Push:
    """What one took.

    Attributes:
        s: seconds, without the probe.
        bytes: sent.
        buckets: in so many parts.
        verified: tensors whose checksums were compared.
        seconds: of them by what was waited for; the rest is gathering, copying and what lies between.
        gap: largest of log-probs between trainer and engine, in nats; NaN where they were not compared.
    """

    s: float
    bytes: int
    buckets: int
    verified: int
    seconds: dict[str, float]
    gap: float


@dataclass(slots=True)
class Trainer:
    """A model with random weights, as trainer ranks hold it, and the engine that it is pushed into.

    Attributes:
        chunks: of the model.
        spec: of it.
        engine: on the same GPU.
        requests: to it.
        sync: with it.
        version: of the last push.
    """

    chunks: list[TreeGPTModel]
    spec: ModelSpec
    engine: EngineHandle
    requests: TimedEngines
    sync: WeightSync
    version: int = 0

    def push(self, bucket_bytes: int, *, probe: bool = False) -> Push:
        """One push; with `probe` log-probs are compared behind it."""
        self.version += 1
        self.requests.clear()
        synchronize()
        sync = self.sync
        buckets = hf_buckets(self.chunks, self.spec, bucket_bytes, sync.buffers, fused=sync.fused)
        report = sync.push(buckets, self.version)
        seconds, gap = self.requests.seconds, nan
        if probe:
            tokens = list(range(LONG_PROBE_TOKENS))
            scores = self.requests.start_scores(tokens)
            wanted = trainer_logprobs(self.chunks[0], probe_pack(tokens))
            gap = probe_gap(wanted.float().cpu().numpy(), scores()[0])
        return Push(report.seconds, report.bytes, report.buckets, len(report.verified), seconds, gap)

    def close(self) -> None:
        """End the engine."""
        self.sync.close()
        self.engine.stop()


@dataclass(slots=True)
class Pushes:
    """What is measured; one trainer with its engine is there at a time, until `close`.

    Attributes:
        engines: where the models' directories are.
        bfloat16: shape of the model whose engine has the trainer's weights.
        fp8: of the one whose engine quantizes them (not a Qwen3: `ModelSpec.check_engine`).
        buckets_mb: `sync.bucket_mb`, the default first.
        repeats: pushes of each, and rounds of lending memory.
    """

    engines: RandomEngines
    bfloat16: ModelSpec = KNOWN_MODELS["Qwen/Qwen3-4B"]
    fp8: ModelSpec = KNOWN_MODELS["Qwen/Qwen2.5-7B-Instruct"]
    buckets_mb: tuple[int, ...] = BUCKETS_MB
    repeats: int = 5
    _trainer: Trainer | None = None
    _kind: Quantization | None = None

    def spec(self, quantization: Quantization) -> ModelSpec:
        """Of the model whose engine has weights of that kind."""
        return self.bfloat16 if quantization == "none" else self.fp8

    def trainer(self, quantization: Quantization) -> Trainer:
        """The one whose engine has weights of that kind."""
        if self._trainer is None or self._kind != quantization:
            self.close()
            self._trainer, self._kind = self._made(quantization), quantization
        return self._trainer

    def close(self) -> None:
        """End what runs."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
            collect()
            reset_peak()

    def _made(self, quantization: Quantization) -> Trainer:
        layout, engines = ParallelConfig(), self.engines
        if not torch.distributed.is_initialized():
            parallel.initialize(layout, seed=1)
        spec = self.spec(quantization)
        chunks = build_chunks(spec, layout, DTYPES[engines.dtype])
        path, options = engines.folder(spec), DUMMY
        if quantization != "none":  # the loader that quantizes what arrives has to read a file first
            export_hf(chunks, spec, path, path / "exported")
            path, options = path / "exported", {}
        collect()
        reset_peak()  # what the engine finds free is its own
        engine = launch_engine(
            path,
            replace(engines.sizes, quantization=quantization),
            dtype=engines.dtype,
            seed=1,
            log_path=engines.logs / "engines.log",
            placement=here(shared=True),
            options=options,
        )
        requests = TimedEngines(engine.url)
        sync = WeightSync(requests, SharedMemory(requests), verify_every=0, comparable=quantization == "none")
        return Trainer(chunks, spec, engine, requests, sync)


def push_parts(what: Pushes) -> list[Part]:
    """In order of value."""
    names: dict[Quantization, str] = {"none": what.engines.dtype, "fp8": "fp8"}
    prepare = {"push": _prepare_push, "memory": _prepare_memory}
    return [
        Part(f"{measured} {name}", partial(begin, what, kind))
        for kind, name in names.items()
        for measured, begin in prepare.items()
    ]


def _prepare_push(what: Pushes, quantization: Quantization) -> Callable[[], Figures]:
    what.engines.folder(what.spec(quantization))

    def measure() -> Figures:
        copied = copies_per_s()
        trainer = what.trainer(quantization)
        # The first push is verified, with checksums where the engine holds the trainer's bits.
        first = trainer.push(_bytes(what.buckets_mb[0]), probe=True)
        figures: Figures = {
            "engine_startup_s": round(trainer.engine.startup_s, 1),
            "gb": round(first.bytes / 1e9, 3),
            "copy_gb_per_s": round(copied / 1e9, 1),
            "goal": PUSH_GOAL,
            "first_s": round(first.s, 3),
            "first_probe_gap": first.gap,
            "tensors_verified": first.verified,
        }
        for size in what.buckets_mb:
            trainer.push(_bytes(size))  # its buffers are made
            pushes = [trainer.push(_bytes(size)) for _ in range(what.repeats)]
            push_s = median(push.s for push in pushes)
            middle = min(pushes, key=lambda push: abs(push.s - push_s))
            figures[f"buckets of {size} MB"] = {
                "buckets": middle.buckets,
                "push_s": [round(push.s, 4) for push in pushes],
                "gb_per_s": round(first.bytes / push_s / 1e9, 2),
                "share_of_copy": round(first.bytes / copied / push_s, 4),
                "share_of_two_copies": round(2 * first.bytes / copied / push_s, 4),
                "of_it_s": {name: round(seconds, 4) for name, seconds in middle.seconds.items()},
            }
        last = trainer.push(_bytes(what.buckets_mb[0]), probe=True)
        return {**figures, "probe_gap": last.gap}

    return measure


def _prepare_memory(what: Pushes, quantization: Quantization) -> Callable[[], Figures]:
    what.engines.folder(what.spec(quantization))

    def measure() -> Figures:
        trainer = what.trainer(quantization)
        trainer.push(_bytes(what.buckets_mb[0]))
        release_s, resume_s, freed, pushes = [], [], [], []
        for _ in range(what.repeats):
            before = _free_bytes()
            release_s.append(_seconds(trainer.requests.release_memory))
            freed.append(_free_bytes() - before)
            resume_s.append(_seconds(trainer.requests.resume_memory))
            pushes.append(trainer.push(_bytes(what.buckets_mb[0]), probe=True))  # it has no weights until then
        return {
            "release_s": [round(seconds, 4) for seconds in release_s],
            "resume_s": [round(seconds, 4) for seconds in resume_s],
            "freed_gib": round(median(freed) / 2**30, 2),
            "push_after_s": [round(push.s, 4) for push in pushes],
            "probe_gap_after": max(push.gap for push in pushes),
        }

    return measure


def _seconds(work: Callable[[], None]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def _free_bytes() -> int:
    """Of the device, for all processes; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def _bytes(bucket_mb: int) -> int:
    return SyncConfig(bucket_mb=bucket_mb).bucket_bytes
