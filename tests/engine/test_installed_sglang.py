"""Names that the installed SGLang must know. One process imports it for all tests: that takes ten seconds."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from arpo_megatron.config import EngineConfig, JobConfig
from arpo_megatron.engine.launch import engine_options
from arpo_megatron.engine.wire import sharing
from arpo_megatron.hardware.environment import NCCL_ENVIRONMENT, process_environment, trainer_environment
from arpo_megatron.hardware.placement import ON_CPU, Placement

PROGRAM = """
import argparse, inspect, json, os
from types import SimpleNamespace
from arpo_megatron.engine.server.cpu import install_stubs
install_stubs()
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from sglang.srt import constants, server_args
from sglang.srt.arg_groups import overrides
from sglang.srt.entrypoints import engine
from sglang.srt.managers import io_struct
from sglang.srt.server_args import ServerArgs

requests = ("UpdateWeightsFromDistributed", "UpdateWeightFromDisk",
    "CheckWeights", "ReleaseMemoryOccupation", "ResumeMemoryOccupation")
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)

class Arguments(SimpleNamespace):
    def __getattr__(self, name):  # every other option is off
        return 0

try:
    engine._set_envs_and_config(Arguments(nnodes=1))
except Exception as error:  # it then checks packages of GPUs
    print(type(error))
nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
server_args.resolved_view = lambda _: SimpleNamespace(attention_backend="fa3")
overrides.run_post_process_pass = lambda *_: None
deterministic = {}
for ranks in (1, 2):
    before = dict(os.environ)
    ServerArgs._handle_deterministic_inference(
        Arguments(enable_deterministic_inference=True, tp_size=ranks, model_path="", device="cuda")
    )
    deterministic[ranks] = sorted(name for name in os.environ.keys() - before.keys() if name.startswith("NCCL_"))
print(json.dumps({
    "options": [option for action in parser._actions for option in action.option_strings],
    "fields": {name: list(getattr(io_struct, name + "ReqInput").__struct_fields__) for name in requests},
    "memory": sorted(constants.GPU_MEMORY_ALL_TYPES),
    "cuda": list(inspect.signature(rebuild_cuda_tensor).parameters),
    "nccl": nccl,
    "deterministic": deterministic,
}))
"""


def nccl(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("NCCL_")}


@pytest.fixture(scope="module")
def known() -> Any:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def test_engine_options_exist(known: Any) -> None:
    config = EngineConfig(attention_backend="fa3", deterministic=True, max_total_tokens=100, quantization="fp8")
    for place in (ON_CPU, Placement.of(JobConfig(name="test"), 1)):
        assert {f"--{name}" for name in engine_options(config, place, "bfloat16")} <= set(known["options"])


def test_requests_of_a_push_have_their_fields(known: Any) -> None:
    sent = {
        "UpdateWeightsFromDistributed": {"names", "dtypes", "shapes", "group_name", "load_format", "flush_cache"},
        "UpdateWeightFromDisk": {"model_path", "load_format", "flush_cache"},
        "CheckWeights": {"action"},
        "ReleaseMemoryOccupation": {"tags"},
        "ResumeMemoryOccupation": {"tags"},
    }
    for name, fields in sent.items():
        assert fields <= set(known["fields"][name]), name
    assert known["memory"] == ["cuda_graph", "kv_cache", "weights"]
    assert known["cuda"][sharing._DEVICE_ARGUMENT] == "storage_device"


def test_trainer_and_engine_agree_on_nccl(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sets some of its variables by itself; for deterministic engines it sets others only if they have several
    ranks, and the config refuses those."""
    for name in nccl(dict(os.environ)):
        monkeypatch.delenv(name)
    assert known["nccl"] == NCCL_ENVIRONMENT
    assert nccl(trainer_environment("auto")) == nccl(process_environment("auto")) == known["nccl"]
    assert not known["deterministic"]["1"]
    assert "NCCL_ALGO" in known["deterministic"]["2"]
