"""Loading and exporting take no more memory per rank than its own shard and the two largest tensors.

Freed blocks that the C library keeps count as memory.
"""

import json
from math import prod
from pathlib import Path

import pytest
import torch

from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.mapping import hf_shapes
from arpo_megatron.models.safetensors import TensorFiles
from tests.ranks import run_ranks
from tests.weights import rank_memory
from tests.weights.rank_memory import DTYPE, MODEL


@pytest.mark.slow_campaign
@pytest.mark.parametrize("layout", [ParallelConfig(tensor=2), ParallelConfig(tensor=2, pipeline=2)])
def test_rank_needs_its_shard_and_two_tensors_at_most(tmp_path: Path, layout: ParallelConfig) -> None:
    rank_memory.write_models(tmp_path)
    run_ranks(rank_memory.main, tmp_path, layout, ranks=layout.world_size)
    shapes = hf_shapes(MODEL)
    largest = sum(sorted(prod(size) * DTYPE.itemsize for size in shapes.values())[-2:])
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(layout.world_size)]
    for rank in ranks:
        assert max(rank["load"], rank["export"]) <= rank["shard"] + largest, ranks
    with TensorFiles(tmp_path / "model") as source, TensorFiles(tmp_path / "exported_model") as exported:
        exported.check(shapes)
        for name, size in shapes.items():
            whole = tuple(slice(None) for _ in size)
            assert torch.equal(source.read(name, whole), exported.read(name, whole)), name
