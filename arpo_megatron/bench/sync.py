"""Weight pushes against the bare transfer of the same bytes: `arpo bench sync`.

The trainer's ranks hold a random model in float32, and an SGLang server on this machine serves it. For each transport,
rounds measure whole pushes and the floor in turn. A push is begin, exchange, commit, and the probe through trainer
and engine together. Every other push is verified, with checksums of every tensor and a longer probe.
`share_of_floor` is the floor over a push without checksums; `share_of_floor_verified` is the floor over a verified
push, the default of `sync.verify_every`. The floor is the bare transfer plus one copy:

    network   one flat tensor broadcast by gloo between two processes
    ipc       one copy into shared memory
    disk      one file written and read

The probe reads all weights in trainer and engine; `share_of_floor_without_probe` excludes it. The weights change before
every push, and the engine must hold the new ones afterwards. `bench.resharding` adds pushes from four trainer ranks to
an engine of two.
"""

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from arpo_megatron.bench import bare, memory
from arpo_megatron.bench.ranks import run_ranks
from arpo_megatron.config import EngineConfig, ModelConfig, ParallelConfig, SyncConfig
from arpo_megatron.errors import UserError
from arpo_megatron.models.mapping import hf_bytes, hf_shapes
from arpo_megatron.models.safetensors import write_tensors
from arpo_megatron.models.spec import ModelSpec

DTYPE = torch.float32
VOCABULARY = 12288
TransportName = Literal["network", "ipc", "disk"]
TRANSPORTS: tuple[TransportName, ...] = ("network", "ipc", "disk")
TIMEOUT_S = 300.0
SIZES = EngineConfig(max_running_requests=4, max_total_tokens=2048, memory_fraction=0.5)
_TINY_BUCKET_BYTES = 2**20


def bench_sync(
    megabytes: int,
    tensor: int,
    bucket_mib: int,
    repeats: int,
    directory: Path | None,
    vocabulary: int = VOCABULARY,
) -> dict[str, Any]:
    """Measure pushes and floors, and return medians over rounds.

    Args:
        megabytes: least 10^6 bytes of weights.
        tensor: tensor-parallel ranks of the trainer.
        bucket_mib: `sync.bucket_mib`.
        repeats: timed rounds, after one warm-up.
        directory: directory for the model and two copies; None for the system's temporary directory.
        vocabulary: size of the vocabulary; each entry has 4 KiB in the embedding.

    Raises:
        UserError: `directory` does not exist, or a rank or the engine failed.
    """
    if directory is not None and not directory.is_dir():
        raise UserError(f"--directory {directory}: no such directory")
    from arpo_megatron.bench.resharding import bench_resharding
    from arpo_megatron.engine.launch import launch_engine

    with TemporaryDirectory(dir=directory, prefix="arpo-bench-sync-") as made:
        root = Path(made)
        spec = _make_model(root / "model", megabytes, vocabulary)
        spec.check_divisible(ParallelConfig(tensor=tensor, sequence=tensor > 1))
        with launch_engine(root / "model", SIZES, dtype="float32", seed=1, log_path=root / "engine.log") as engine:
            settings = {
                "url": engine.url,
                "engine_pid": _largest(engine.process.pid),
                "tensor": tensor,
                "bucket_mib": bucket_mib,
                "repeats": repeats,
            }
            (root / "settings.json").write_text(json.dumps(settings))
            run_ranks("sync", root, tensor)
        transports = json.loads((root / "figures.json").read_text())
        resharding = bench_resharding(root, bucket_mib, repeats)
    layouts = [figures for of_layout in resharding.values() for figures in of_layout.values()]
    return {
        "model_bytes": hf_bytes(spec, DTYPE.itemsize),
        "tensor": tensor,
        "bucket_bytes": bucket_mib * 2**20,
        "share_of_floor": transports["network"]["share_of_floor"],
        "share_of_floor_verified": transports["network"]["share_of_floor_verified"],
        "bytes_over_own_shard": max(each["bytes_over_own_shard"] for each in layouts),
        "largest_buffer_over_bucket": max(each["largest_buffer_over_bucket"] for each in layouts),
        "exchange_over_push": resharding["TP2 x PP2"]["network"]["exchange_over_push"],
        "exchange_over_push_ipc": resharding["TP2 x PP2"]["ipc"]["exchange_over_push"],
        "transports": transports,
        "resharding": resharding,
    }


def _make_model(directory: Path, megabytes: int, vocabulary: int) -> ModelSpec:
    """Write a random Qwen3 of at least that size, with the tokenizer of the generated tasks."""
    from arpo_megatron.models.tiny import generated_tokenizer, make_model_directory

    model = ModelConfig(hidden_size=1024, layers=1, heads=16, kv_heads=8, ffn_size=4096, dtype="float32")
    make_model_directory(directory, model, generated_tokenizer())
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"vocab_size": vocabulary}
    file.write_text(json.dumps(config))
    one = hf_bytes(ModelSpec.from_hf(directory), DTYPE.itemsize)
    config["num_hidden_layers"] = 2
    file.write_text(json.dumps(config))
    step = hf_bytes(ModelSpec.from_hf(directory), DTYPE.itemsize) - one
    config["num_hidden_layers"] = 1 + max(1, ceil((megabytes * 1e6 - one) / step))  # two stages need two layers
    file.write_text(json.dumps(config))
    spec = ModelSpec.from_hf(directory)
    draw = torch.Generator().manual_seed(1)
    tensors = (
        (name, torch.ones(size) if len(size) == 1 else torch.randn(size, generator=draw) * 0.02)
        for name, size in hf_shapes(spec).items()
    )
    write_tensors(tensors, hf_shapes(spec), DTYPE, directory, 2**40)
    return spec


def _largest(pid: int) -> int:
    """Return the engine's process with the weights."""
    processes = psutil.Process(pid).children(recursive=True)
    return max(processes, key=lambda process: process.memory_info().rss).pid


class Floors:
    """Bare transfers of `size` bytes, each followed by one memory copy, with preallocated buffers."""

    def __init__(self, size: int, directory: Path) -> None:
        self._file = directory / "floor"
        self._source = torch.ones(size, dtype=torch.uint8)
        self._target = torch.zeros(size, dtype=torch.uint8)
        self._shared = torch.zeros(size, dtype=torch.uint8).share_memory_()
        self._store = bare.make_store(2)
        self._receiver = bare.start_receiver(_receive, self._store.port, size)
        self._group = bare.join(self._store.port, 0, 2)

    def seconds(self, transport: str) -> float:
        """Return the seconds of one transfer and one copy."""
        transfers: dict[str, Callable[[], None]] = {
            "network": self._broadcast,
            "ipc": self._copy_out,
            "disk": self._disk,
        }
        started = time.perf_counter()
        transfers[transport]()
        self._target.copy_(self._source)
        return time.perf_counter() - started

    def close(self) -> None:
        """End the receiver's process."""
        bare.meet(self._group, more=False)
        self._receiver.join()

    def _broadcast(self) -> None:
        bare.meet(self._group, more=True)
        self._group.broadcast([self._source]).wait()
        bare.meet(self._group, more=True)

    def _copy_out(self) -> None:
        self._shared.copy_(self._source)

    def _disk(self) -> None:
        with self._file.open("wb") as out:
            out.write(self._source.numpy().data)
        with self._file.open("rb") as file:
            file.readinto(self._target.numpy().data)
        self._file.unlink()


def _receive(port: int, size: int) -> None:
    group = bare.join(port, 1, 2)
    target = torch.zeros(size, dtype=torch.uint8)
    while bare.meet(group, more=True):
        group.broadcast([target]).wait()
        bare.meet(group, more=True)


@dataclass(frozen=True, slots=True)
class PushTimes:
    """Seconds of a push with its probe, and of the probe alone."""

    push: float
    probe: float


class Pushes:
    """One rank's pushes by one transport: verified and plain pushes in turn."""

    def __init__(
        self, root: Path, settings: dict[str, Any], transport: TransportName, chunks: Any, spec: ModelSpec
    ) -> None:
        from arpo_megatron.actor import parallel
        from arpo_megatron.engine.admin import EngineAdmin
        from arpo_megatron.weights.control import Control
        from arpo_megatron.weights.sync import PushSettings, WeightSync

        self._chunks = chunks
        self._engine_pid: int = settings["engine_pid"]
        self.bucket_bytes = SyncConfig(bucket_mib=settings["bucket_mib"]).bucket_bytes
        self.two_buckets_bytes = 2 * settings["bucket_mib"] * 2**20

        def sync(bucket_bytes: int) -> WeightSync:
            asked = PushSettings(
                transport=transport, bucket_bytes=bucket_bytes, verify_every=2, directory=root / "sync"
            )
            requests = EngineAdmin([settings["url"]], TIMEOUT_S)
            control = Control(parallel.group("control"))
            return WeightSync(control, requests, chunks, spec, asked, note=lambda _: None)

        self._make_sync = sync
        self.sync = sync(self.bucket_bytes)
        self._version = 0
        self.gap = 0.0
        self.checksums = 0
        self.verified: list[PushTimes] = []
        self.plain: list[PushTimes] = []
        self.peaks: tuple[int, int] | None = None

    def verified_push(self) -> None:
        """Push with verification; the first call also measures memory."""
        if self.peaks is not None:
            self._push(self.verified, self.sync)
            return
        warm_up = self._make_sync(_TINY_BUCKET_BYTES)  # of code, threads and connections
        for _ in range(2):
            self._push([], warm_up)
        warm_up.close()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pids: tuple[int, int] = (os.getpid(), self._engine_pid)
        before = [memory.resident(pid) for pid in pids]
        for pid in pids:
            memory.reset(pid)
        self._push(self.verified, self.sync)
        peaks = [memory.highest(pid) - held for pid, held in zip(pids, before, strict=True)]
        self.peaks = peaks[0], peaks[1]

    def plain_push(self) -> None:
        """Push without verification, after a verified push."""
        self._push(self.plain, self.sync)

    def close(self) -> None:
        """Close the connections to the engine."""
        self.sync.close()

    def _push(self, took: list[PushTimes], sync: Any) -> None:
        from arpo_megatron.actor import parallel
        from arpo_megatron.trainer.push import probe_pack
        from arpo_megatron.weights.sync import probe_gap

        self._change()
        self._version += 1
        started = time.perf_counter()
        report = sync.push(self._version)
        pushed = time.perf_counter()
        tokens = list(range(report.probe_tokens))
        logprobs = sync.engines.start_logprobs(tokens) if parallel.is_rank_zero() else None
        own = trainer_logprobs(self._chunks[0], probe_pack(tokens))  # while the engine does
        if logprobs is not None:
            self.gap = max(self.gap, probe_gap(own.numpy(), logprobs()[0]))
        ended = time.perf_counter()
        took.append(PushTimes(ended - started, ended - pushed))
        self.checksums = len(report.verified) or self.checksums

    def _change(self) -> None:
        with torch.no_grad():
            for chunk in self._chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(1.001)


def trainer_logprobs(model: Any, pack: Any) -> Tensor:
    """Return the trainer's log-probs of the pack's targets, float32[m]."""
    from arpo_megatron.actor.microbatch import ContextShard, MicroBatches

    shard = ContextShard(multiple_of=dist.get_world_size())  # all ranks are tensor-parallel with sequence parallelism
    with torch.no_grad(), MicroBatches([pack], None, shard) as batches:
        logprobs: Tensor = model(*batches.make(0).inputs)[0]
    return logprobs


def main() -> None:
    """Measure floors and pushes in turn on one rank."""
    from arpo_megatron.actor import parallel
    from arpo_megatron.actor.model import build_chunks
    from arpo_megatron.weights.load import load_hf

    root = Path(sys.argv[1])
    settings = json.loads((root / "settings.json").read_text())
    spec = ModelSpec.from_hf(root / "model")
    layout = ParallelConfig(tensor=settings["tensor"], sequence=settings["tensor"] > 1)
    parallel.initialize(layout, seed=1)
    torch.set_num_threads(1)  # the engine has the other core
    chunks = build_chunks(spec, layout, DTYPE, initialize=False)
    load_hf(chunks, spec, root / "model")
    floors = Floors(hf_bytes(spec, DTYPE.itemsize), root) if parallel.is_rank_zero() else None
    floor_s: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
    pushes = {name: Pushes(root, settings, name, chunks, spec) for name in TRANSPORTS}
    for name in TRANSPORTS:  # an engine follows the plan of one trainer at a time
        for _ in range(1 + settings["repeats"]):
            pushes[name].verified_push()
            if floors is not None:
                floor_s[name].append(floors.seconds(name))
            dist.barrier()
            pushes[name].plain_push()
    if floors is not None:
        figures = {name: _figures(pushes[name], floor_s[name][1:]) for name in TRANSPORTS}
        (root / "figures.json").write_text(json.dumps(figures))
        floors.close()
    for push in pushes.values():
        push.close()
    parallel.destroy()


def _figures(pushes: Pushes, floor_s: list[float]) -> dict[str, Any]:
    if pushes.peaks is None:
        raise AssertionError("no push was measured")
    plain, verified = pushes.plain[1:], pushes.verified[1:]

    def share(seconds: Iterable[float]) -> float:
        return round(median(floor_s) / median(seconds), 3)

    def rounded(seconds: Iterable[float]) -> list[float]:
        return [round(each, 3) for each in seconds]

    return {
        "share_of_floor": share(took.push for took in plain),
        "share_of_floor_verified": share(took.push for took in verified),
        "share_of_floor_without_probe": share(took.push - took.probe for took in plain),
        "floor_s": rounded(floor_s),
        "push_s": rounded(took.push for took in plain),
        "probe_s": rounded(took.probe for took in plain),
        "verified_push_s": rounded(took.push for took in verified),
        "verified_probe_s": rounded(took.probe for took in verified),
        "peak_extra_bytes": pushes.peaks[0],
        "engine_peak_extra_bytes": pushes.peaks[1],
        "two_buckets_bytes": pushes.two_buckets_bytes,
        "probe_gap": pushes.gap,
        "tensors_verified": pushes.checksums,
    }


if __name__ == "__main__":
    main()
