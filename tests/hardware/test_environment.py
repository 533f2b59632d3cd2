"""Variables of a job's processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from arpo_megatron.config import Platform
from arpo_megatron.hardware.environment import (
    KERNEL_CACHE_ENVIRONMENT,
    process_environment,
    trainer_environment,
)

PRODUCTS_OF_NEW_SHAPES = """
import torch
from arpo_megatron.bench.memory import resident
from arpo_megatron.hardware.onednn import product
weight = torch.ones(384, 128)
def grow(rows):
    for count in rows:
        product(torch.ones(count, 128), weight)
    return resident()
warm = grow(range(1000, 1180))
print(grow(range(1180, 1280)) - warm)
"""


def nccl(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("NCCL_")}


def test_users_nccl_settings_hold_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert process_environment("auto")["NCCL_NVLS_ENABLE"] == trainer_environment("auto")["NCCL_NVLS_ENABLE"] == "1"
    assert not nccl(process_environment("cpu"))


@pytest.mark.parametrize("platform", ["auto", "cpu"])
def test_every_process_bounds_its_caches_of_products(platform: Platform) -> None:
    assert KERNEL_CACHE_ENVIRONMENT.items() <= trainer_environment(platform).items()
    assert KERNEL_CACHE_ENVIRONMENT.items() <= process_environment(platform).items()


def test_compiled_kernels_outlive_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert trainer_environment("auto")["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache/arpo_megatron/kernels")
    assert "TORCHINDUCTOR_CACHE_DIR" not in trainer_environment("cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing/cache")
    assert "TORCHINDUCTOR_CACHE_DIR" not in trainer_environment("auto"), (
        "torch's own folder, if the home cannot be used"
    )
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert "TORCHINDUCTOR_CACHE_DIR" not in trainer_environment("auto")


def test_products_of_new_shapes_keep_no_memory() -> None:
    environment = {**os.environ, **process_environment("cpu")}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS_OF_NEW_SHAPES], capture_output=True, text=True, check=True, env=environment
    )
    assert int(done.stdout) < 60 * 2**20  # 120 MB with the bounds that the caches have by default
