"""The export of a checkpoint holds about one layer of weights at a time, so that any machine can export any model."""

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arpo_megatron.actor.model import build_chunks
from arpo_megatron.actor.stored_weights import stored_tensors
from arpo_megatron.actor.training_state import WeightsOnly
from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.mapping import hf_shapes
from arpo_megatron.models.safetensors import write_tensors
from tests.actor import cases

SPEC = replace(cases.QWEN3, layers=16, hidden=512, heads=8, head_dim=64, ffn=1024)
LAYER_BYTES = 4 * 512 * (2 * 512 + 2 * 128 + 3 * 1024)
"""Query and output, key and value, and the three matrices of the MLP, in float32."""


def memory(name: str) -> int:
    """Return a size of /proc/self/status in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.usefixtures("one_rank")
def test_export_takes_the_memory_of_four_layers_at_most(tmp_path: Path) -> None:
    (stored := tmp_path / "stored").mkdir()
    chunks = build_chunks(SPEC, ParallelConfig(), "float32", initialize=False)
    cases.write(WeightsOnly(chunks).snapshot(stored))
    del chunks
    ctypes.CDLL(None).malloc_trim(0)  # what was freed would hide what the export takes
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
    write_tensors(stored_tensors(stored, SPEC, "float32"), hf_shapes(SPEC), torch.float32, tmp_path, 2**30)
    assert (tmp_path / "model.safetensors").stat().st_size > SPEC.layers * LAYER_BYTES
    assert memory("VmHWM") - before < 4 * LAYER_BYTES
