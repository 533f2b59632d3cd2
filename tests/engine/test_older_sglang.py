"""The code for sglang 0.5.12, which needs an older torch, against stubs of its classes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from arpo_megatron.config import EngineConfig
from arpo_megatron.engine import launch
from arpo_megatron.engine.server import checksums, gate, receive
from arpo_megatron.engine.wire.boxes import EXCHANGE_FORMAT, TensorType
from arpo_megatron.engine.wire.checksums import CHECKSUM_ACTION, PIECES_ACTION
from arpo_megatron.hardware.environment import trainer_environment
from arpo_megatron.hardware.placement import ON_CPU, Placement


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.arange(16.0).view(4, 4))

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.head.data.copy_(tensor)


def test_push_sets_the_version_in_the_servers_arguments() -> None:
    manager = SimpleNamespace(server_args=SimpleNamespace(weight_version="0"))
    gate._set_version(manager, 7)
    assert manager.server_args.weight_version == "7"


def test_checksums_use_the_runners_model() -> None:
    model = Model()
    checker = SimpleNamespace(
        _model_runner=SimpleNamespace(model=model),
        _parallelism_info=lambda: SimpleNamespace(tp_rank=0, model_dump=dict),
    )
    action = CHECKSUM_ACTION + json.dumps({"head": TensorType((4, 4), "float32").as_json()})
    answer = checksums._handle(lambda *_: None, checker, action)
    assert len(json.loads(answer["checksums"]["answer"])) == 32
    pieces = checksums._handle(lambda *_: None, checker, PIECES_ACTION)
    assert json.loads(pieces["checksums"]["answer"]).keys() == {"head"}


def test_engine_starts_no_second_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer without the token. SGLang reads its port from the environment, too."""
    monkeypatch.setenv("SGLANG_GRPC_PORT", "4711")
    assert "SGLANG_GRPC_PORT" not in launch._environment(tmp_path, ON_CPU, EngineConfig(), "127.0.0.1")


def test_model_runner_takes_part_in_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Any] = []
    monkeypatch.setattr(receive.shard, "receive", lambda plan, deadline_s: received.append((plan, deadline_s)))
    settings = EXCHANGE_FORMAT + json.dumps({"plan": "newest", "deadline_s": 3.0})
    assert receive._receive(None, [], [], [], "group", settings)[0]
    assert received == [("newest", 3.0)]
    assert not receive._receive(None, ["head"], ["float32"], [[4, 4]], "group")[0]


def test_engine_environment_has_no_variables_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in trainer_environment("auto").items():
        monkeypatch.setenv(name, value)
    environment = launch._environment(tmp_path, Placement(1, 0, colocated=True), EngineConfig(), "127.0.0.1")
    assert int(environment["SGLANG_FORCE_STREAM_INTERVAL"]) > 2**30
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8")  # somebody's own choice
    assert "PYTORCH_CUDA_ALLOC_CONF" in launch._environment(
        tmp_path, Placement(1, 0, colocated=True), EngineConfig(), "127.0.0.1"
    )
