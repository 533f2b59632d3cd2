"""Load models, compute log-probs, export, and gather in small buckets; the ranks of test_conversion.py run it."""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file

from arpo_megatron.actor import parallel
from arpo_megatron.actor.model import build_chunks
from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.mapping import hf_shapes
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.buckets import RowBlock
from arpo_megatron.weights.export import export_hf, hf_buckets
from arpo_megatron.weights.load import load_hf
from tests.actor.cases import join
from tests.models.tiny_models import megatron_logprobs, sample_tokens

BUCKET_BYTES = 5000
"""Smaller than most tensors of these models."""
LAYOUTS = {
    "tensor": ParallelConfig(tensor=2, sequence=True),
    "pipeline": ParallelConfig(pipeline=2),
    "expert": ParallelConfig(data=2, expert=2),
    "tensor-pipeline": ParallelConfig(tensor=2, pipeline=2, sequence=True),
    "tensor-expert": ParallelConfig(tensor=2, data=2, expert=2, sequence=True),
    "interleaved": ParallelConfig(data=2, pipeline=2, virtual_pipeline=2, expert=2),
}


def main(root: Path, runs: dict[str, list[str]]) -> None:
    """For each layout named in `runs`, take its models under `root` through a round trip; all layouts have one size."""
    for name, models in runs.items():
        layout = LAYOUTS[name]
        join(layout)
        for model in models:
            spec = ModelSpec.from_hf(root / model)
            round_trip(spec, root / model, layout, root.parent / "exported" / name / model)
    parallel.destroy()


def round_trip(spec: ModelSpec, source: Path, layout: ParallelConfig, out: Path) -> None:
    chunks = build_chunks(spec, layout, "float32", initialize=False)
    for chunk in chunks:
        for tensor in chunk.parameters():
            torch.nn.init.constant_(tensor, math.nan)  # whatever is left unloaded will show
    load_hf(chunks, spec, source)
    assert all(tensor.isfinite().all() for chunk in chunks for tensor in chunk.parameters())
    export_hf(chunks, spec, source, out)
    blocks_are_the_files_rows(chunks, spec, source)
    if layout.pipeline == 1:
        with torch.no_grad():
            logprobs = megatron_logprobs(chunks[0], sample_tokens())
        if parallel.is_rank_zero():
            torch.save(logprobs, out / "logprobs.pt")


def blocks_are_the_files_rows(chunks: list[torch.nn.Module], spec: ModelSpec, source: Path) -> None:
    """Assert that buckets have the rows of the file; some blocks lie in the parts of two ranks."""
    expected, tops = load_file(source / "model.safetensors"), dict.fromkeys(hf_shapes(spec), 0)
    blocks = 0
    for bucket in hf_buckets(chunks, spec, BUCKET_BYTES):
        tensors = [(bucket.name, bucket.tensor)] if isinstance(bucket, RowBlock) else bucket
        for name, tensor in tensors:
            whole, top = expected[name], tops[name]
            tops[name] += len(tensor)
            assert torch.equal(tensor, whole[top : tops[name]]), name
            if isinstance(bucket, RowBlock):
                blocks += 1
                assert (bucket.first, bucket.count, bucket.is_last) == (top, len(whole), tops[name] == len(whole))
        assert sum(tensor.nbytes for _, tensor in tensors) <= BUCKET_BYTES
    if parallel.is_rank_zero():
        assert tops == {name: len(expected[name]) for name in tops}
        assert blocks >= 2  # of the embedding
