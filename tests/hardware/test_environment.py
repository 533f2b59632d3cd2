"""Variables of a job's processes."""

import json
import os
import subprocess
import sys

import pytest

from arpo_megatron.hardware.environment import NCCL_ENVIRONMENT, process_environment, trainer_environment

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
