"""Load and export a model on one rank and write its peaks of memory; the ranks of test_memory.py run it."""

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from arpo_megatron.actor import parallel
from arpo_megatron.actor.model import build_chunks
from arpo_megatron.bench import memory
from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.mapping import hf_shapes
from arpo_megatron.models.safetensors import write_tensors
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.export import export_hf
from arpo_megatron.weights.load import load_hf

DTYPE = torch.bfloat16
SHARD_BYTES = 400_000_000
"""Size of the files, so that there are several as in real checkpoints."""
MODEL = replace(
    KNOWN_MODELS["meta-llama/Llama-3.1-8B-Instruct"], layers=2, hidden=2048, head_dim=64, ffn=8192, tied=True
)
"""The widths of Llama 3.2 1B, a hard case: its tied embedding is by far the largest tensor."""
WARM_UP = replace(MODEL, vocabulary=1024, hidden=64, ffn=64)


def write_models(root: Path) -> None:
    """Write both models with random weights, tensor by tensor."""
    for name, spec in (("warm_up", WARM_UP), ("model", MODEL)):
        (root / name).mkdir()
        (root / name / "config.json").write_text("{}")
        write_tensors(_random(spec), hf_shapes(spec), DTYPE, root / name, SHARD_BYTES)


def _random(spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    for name, shape in hf_shapes(spec).items():
        yield name, torch.randn(shape, generator=draw, dtype=DTYPE)


def main(root: Path, layout: ParallelConfig) -> None:
    """Write the rank's shard and peaks in bytes, after a tiny model that warms up all code."""
    parallel.initialize(layout, seed=1)

    def peaks(name: str, spec: ModelSpec) -> dict[str, int]:
        gc.collect()
        before = memory.resident()
        chunks = build_chunks(spec, layout, DTYPE, initialize=False)

        def peak(work: Callable[[], object]) -> int:
            memory.reset()
            work()
            return memory.highest() - before

        out = root / f"exported_{name}"
        return {
            "load": peak(lambda: load_hf(chunks, spec, root / name)),
            "export": peak(lambda: export_hf(chunks, spec, root / name, out, max_shard_bytes=SHARD_BYTES)),
            "shard": sum(tensor.nbytes for chunk in chunks for tensor in chunk.parameters()),
        }

    try:
        peaks("warm_up", WARM_UP)
        (root / f"rank{parallel.rank()}.json").write_text(json.dumps(peaks("model", MODEL)))
    finally:
        parallel.destroy()
