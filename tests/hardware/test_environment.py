"""Variables of a job's processes."""

import json
import os
import subprocess
import sys

import pytest

from arpo_megatron.config import Platform
from arpo_megatron.hardware.environment import (
    KERNEL_CACHE_ENVIRONMENT,
    NCCL_ENVIRONMENT,
    process_environment,
    trainer_environment,
)

SGLANG_SETS = """
import json, os
from types import SimpleNamespace
from arpo_megatron.engine.server.cpu import install_stubs
install_stubs()
from sglang.srt.entrypoints import engine
class Arguments(SimpleNamespace):
    def __getattr__(self, name):  # every other option is off
        return 0
try:
    engine._set_envs_and_config(Arguments(nnodes=1))
except Exception as error:  # it then checks packages of GPUs
    print(type(error))
print(json.dumps({name: value for name, value in os.environ.items() if name.startswith("NCCL_")}))
"""

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


def test_trainer_and_engine_agree_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sets some of its variables by itself. Deterministic engines with several ranks, for which it would set
    others, are refused."""
    for name in nccl(dict(os.environ)):
        monkeypatch.delenv(name)
    done = subprocess.run(
        [sys.executable, "-c", SGLANG_SETS], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    alone = json.loads(done.stdout.splitlines()[-1])
    assert alone == NCCL_ENVIRONMENT
    assert nccl(trainer_environment("auto")) == nccl(process_environment("auto")) == alone


def test_users_nccl_settings_hold_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert process_environment("auto")["NCCL_NVLS_ENABLE"] == trainer_environment("auto")["NCCL_NVLS_ENABLE"] == "1"
    assert not nccl(process_environment("cpu"))


@pytest.mark.parametrize("platform", ["auto", "cpu"])
def test_every_process_bounds_its_caches_of_products(platform: Platform) -> None:
    assert KERNEL_CACHE_ENVIRONMENT.items() <= trainer_environment(platform).items()
    assert KERNEL_CACHE_ENVIRONMENT.items() <= process_environment(platform).items()


def test_products_of_new_shapes_keep_no_memory() -> None:
    environment = {**os.environ, **process_environment("cpu")}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS_OF_NEW_SHAPES], capture_output=True, text=True, check=True, env=environment
    )
    assert int(done.stdout) < 60 * 2**20  # 120 MB with the bounds that the caches have by default
