"""Memory of loading and exporting a model: no rank needs more than its own shard and the two largest tensors.

The random model has the widths of Llama 3.2 1B, a hard case: its tied embedding is by far the largest tensor. The
benchmark writes the model tensor by tensor, starts the ranks, and compares the export with the source. Freed blocks
that the C library keeps count as memory.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil, prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from arpo_megatron.bench import memory
from arpo_megatron.bench.ranks import run_ranks
from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.mapping import hf_bytes, hf_shapes
from arpo_megatron.models.safetensors import TensorFiles, write_tensors
from arpo_megatron.models.spec import ModelSpec

DTYPE = torch.bfloat16
SHARD_BYTES = 400_000_000
"""Size of the files, so that there are several as in real checkpoints."""
SMALLEST = ModelSpec(
    family="llama",
    layers=1,
    hidden=2048,
    heads=32,
    kv_heads=8,
    head_dim=64,
    ffn=8192,
    vocabulary=128256,
    rope_theta=5e5,
    norm_eps=1e-5,
    tied=True,
    qkv_bias=False,
    qk_norm=False,
    max_positions=4096,
)
WARM_UP = replace(SMALLEST, vocabulary=1024, hidden=64, ffn=64)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory and time of one rank; bytes exclude its resident memory before the model was built."""

    shard_bytes: int
    load_peak_bytes: int
    export_peak_bytes: int
    load_s: float
    export_s: float


def bench_load(gigabytes: float, tensor: int, pipeline: int, directory: Path | None) -> dict[str, Any]:
    """Measure loading and exporting a model in bfloat16.

    Args:
        gigabytes: least 10^9 bytes of weights.
        tensor: tensor-parallel ranks.
        pipeline: pipeline stages.
        directory: directory for twice the model's size; None for the system's temporary directory.

    Raises:
        UserError: the layout does not divide the model, or a rank failed.
    """
    spec, layout = _spec(gigabytes, pipeline), ParallelConfig(tensor=tensor, pipeline=pipeline)
    spec.check_divisible(layout)
    with TemporaryDirectory(dir=directory, prefix="arpo-bench-load-") as made:
        root = Path(made)
        for name, size in (("warm_up", replace(WARM_UP, layers=pipeline)), ("model", spec)):
            (root / name).mkdir()
            (root / name / "config.json").write_text("{}")
            tensors = hf_shapes(size)
            print(f"writing {name}: {hf_bytes(size, DTYPE.itemsize) / 1e9:.2f} GB", file=sys.stderr)
            write_tensors(_random(tensors), tensors, DTYPE, root / name, SHARD_BYTES)
        ranks = _measure_ranks(root, spec, layout)
        exact = _same(root / "model", root / "exported", spec)
    largest = sorted((prod(size) * DTYPE.itemsize for size in hf_shapes(spec).values()), reverse=True)[:2]
    bounds = [rank.shard_bytes + sum(largest) for rank in ranks]
    return {
        "model_bytes": hf_bytes(spec, DTYPE.itemsize),
        "tensor": tensor,
        "pipeline": pipeline,
        "largest_tensors_bytes": largest,
        "bound_bytes": bounds,
        **{key: [asdict(rank)[key] for rank in ranks] for key in asdict(ranks[0])},
        "within_bound": all(
            max(rank.load_peak_bytes, rank.export_peak_bytes) <= bound
            for rank, bound in zip(ranks, bounds, strict=True)
        ),
        "bit_exact": exact,
    }


def _spec(gigabytes: float, pipeline: int) -> ModelSpec:
    """Return a model with the fewest layers for the size, divisible by the stages."""
    rest, one = (hf_bytes(replace(SMALLEST, layers=layers), DTYPE.itemsize) for layers in (0, pipeline))
    steps = ceil((gigabytes * 1e9 - rest) / (one - rest))
    return replace(SMALLEST, layers=max(1, steps) * pipeline)


def _random(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    for name, shape in shapes.items():
        yield name, torch.randn(shape, generator=draw, dtype=DTYPE)


def _same(left: Path, right: Path, spec: ModelSpec) -> bool:
    with TensorFiles(left) as first, TensorFiles(right) as second:
        tensors = hf_shapes(spec)
        second.check(tensors)
        everything = {name: tuple(slice(None) for _ in size) for name, size in tensors.items()}
        return all(torch.equal(first.read(name, part), second.read(name, part)) for name, part in everything.items())


def _measure_ranks(root: Path, spec: ModelSpec, layout: ParallelConfig) -> list[RankMemory]:
    settings = {"layers": spec.layers, "tensor": layout.tensor, "pipeline": layout.pipeline}
    (root / "settings.json").write_text(json.dumps(settings))
    run_ranks("load", root, layout.world_size)
    return [RankMemory(**json.loads((root / f"rank{rank}.json").read_text())) for rank in range(layout.world_size)]


def _peak(work: Callable[[], Any]) -> tuple[int, float]:
    """Return the peak resident memory while `work` runs, in bytes, and its seconds."""
    memory.reset()
    started = time.perf_counter()
    work()
    return memory.highest(), time.perf_counter() - started


def main() -> None:
    """Load and export the model on one rank, after a tiny one that warms up all code."""
    from arpo_megatron.actor import parallel
    from arpo_megatron.actor.model import build_chunks
    from arpo_megatron.weights.export import export_hf
    from arpo_megatron.weights.load import load_hf

    root = Path(sys.argv[1])
    settings = json.loads((root / "settings.json").read_text())
    layers = settings.pop("layers")
    layout = ParallelConfig(**settings)
    parallel.initialize(layout, seed=1)

    def measured(name: str, spec: ModelSpec, out: Path) -> RankMemory:
        gc.collect()
        baseline = memory.resident()
        chunks = build_chunks(spec, layout, DTYPE, initialize=False)
        shard = sum(tensor.nbytes for chunk in chunks for tensor in chunk.parameters())
        load_peak, load_s = _peak(lambda: load_hf(chunks, spec, root / name))
        export_peak, export_s = _peak(lambda: export_hf(chunks, spec, root / name, out, max_shard_bytes=SHARD_BYTES))
        return RankMemory(shard, load_peak - baseline, export_peak - baseline, round(load_s, 2), round(export_s, 2))

    try:
        measured("warm_up", replace(WARM_UP, layers=layout.pipeline), root / "warmed_up")
        figures = measured("model", replace(SMALLEST, layers=layers), root / "exported")
        (root / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(asdict(figures)))
    finally:
        parallel.destroy()


if __name__ == "__main__":
    main()
