"""The CUDA path without a GPU: attention compiles to sm_90 within bounds, and a whole update runs on fake tensors.

The compiler is that of a GPU machine (Inductor, Triton, ptxas); only the device is pretended. No kernel is run.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from arpo_megatron.jobs import resolve
from arpo_megatron.models.known import load_spec
from tests.actor.sm90.pretend import build_guard

pytestmark = [
    pytest.mark.slow_campaign,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
REGISTERS = 255
"""Registers of a thread: more do not exist, and values that find none are spilled."""
STACK = {"forward": 0, "backward": 256}
"""Bytes per thread that may lie in memory."""
LOOP_SPILLS = {"forward": 0, "backward": 8}
"""Spilled values per block of the mask; those of the stack that are used outside of loops cost little."""
SHARED = 232448
"""Bytes of shared memory of a block on an H100 or H200."""


def head_shapes() -> set[tuple[int, int, int]]:
    """Return query heads, key heads and head width of a rank of each layout of each recipe."""
    shapes = set()
    for recipe in resolve.recipe_names():
        if resolve.resolve(recipe).model.is_generated:
            continue
        for layout in resolve.layout_names(recipe):
            job = resolve.resolve(f"{recipe}+{layout}")
            spec, tensor = load_spec(job.model), job.parallel.tensor
            shapes.add((spec.heads // tensor, spec.kv_heads // tensor, spec.head_dim))
    return shapes


def pretend(script: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a script of tests/actor/sm90 on a pretended device; return the rows that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.actor.sm90.{script}", build_guard(folder), *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_attention_of_every_recipe_compiles_within_bounds(tmp_path: Path) -> None:
    asked = [",".join(map(str, shape)) for shape in sorted(head_shapes())]
    rows = pretend("compile_attention", tmp_path, *asked)
    assert [row["shape"] for row in rows] == asked
    for row in rows:
        assert row["again"] == 0, "a second call of the same lengths has compiled again"
        kernels = [kernel for kernel in row["kernels"] if kernel["wgmma"] + kernel["mma"]]
        # With and without gradient, and the backward pass.
        assert len(kernels) == 3, [kernel["name"] for kernel in row["kernels"]]
        for kernel in kernels:
            print(row["shape"], kernel)
            kind = "backward" if "backward" in kernel["name"] else "forward"
            assert kernel["wgmma"] > 0 and not kernel["mma"], "Hopper's matrix instructions are not used"
            assert kernel["registers"] <= REGISTERS and kernel["shared_bytes"] <= SHARED
            assert kernel["stack_bytes"] <= STACK[kind] and not kernel["local_bytes"], kernel
            assert kernel["loops"], "no loop with matrix instructions is found"
            for loop in kernel["loops"]:
                assert loop["spill_stores"] + loop["spill_loads"] <= LOOP_SPILLS[kind], kernel


def test_a_whole_update_has_the_planned_memory_and_few_waits(tmp_path: Path) -> None:
    (found,) = pretend("whole_step", tmp_path)
    print(found)
    assert found["held"] == pytest.approx(found["planned_held"], rel=1e-6)
    assert found["peak"] == pytest.approx(found["planned_peak"], rel=0.1)
    assert found["peak"] > found["held"] + 0.9 * found["kept"]
    assert found["after"] == found["held"], "memory of the update is not returned"
    waits: Counter[str] = Counter()
    for place, count in found["waits"].items():
        waits[place.rpartition(" ")[2]] += count
    # Without Transformer Engine, Megatron reads the norm of each gradient.
    assert waits.pop("gradient_norm") == found["parameters"] + 1
    assert waits == {"of": 1}
    assert found["launches"]["head"] <= 28 and sum(found["launches"].values()) <= 796, "docs/reference/performance.md"
    assert not found["device_copies"], "a copy of pageable memory to the device"
