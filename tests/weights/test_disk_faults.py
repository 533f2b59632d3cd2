"""Faulty files in a push by `disk` to a real engine of two ranks: none is committed; the next push repairs it."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from arpo_megatron.engine.admin import WeightPushError
from arpo_megatron.engine.launch import EngineHandle
from arpo_megatron.models.safetensors import write_file
from arpo_megatron.weights.transports import disk
from tests.weights.pushes import generate, post, trainer

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow_campaign]
DOWN = "model.layers.2.mlp.down_proj.weight"

Write = Callable[[Path, Sequence[tuple[str, Tensor]]], None]


def torn(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """The last bytes of the file are missing, as on a shared file system that reports their loss too late."""
    write_file(path, tensors)
    if any(name == DOWN for name, _ in tensors):
        os.truncate(path, path.stat().st_size - 100)


def left_out(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """A tensor is not in the file, which is whole otherwise."""
    write_file(path, [(name, tensor) for name, tensor in tensors if name != DOWN])


def one_bit(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """The lowest bit of the file's last value is wrong."""
    write_file(path, tensors)
    if any(name == DOWN for name, _ in tensors):
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-4, os.SEEK_END)
            file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torn, "Failed to update weights"),
        (left_out, f"{DOWN} is not what the trainer sent"),
        (one_bit, "is not what the trainer sent"),
    ],
)
def test_wrong_file_fails_the_push_and_the_next_one_repairs_the_engine(
    engine: EngineHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Write, message: str
) -> None:
    trained = trainer(tmp_path, 81)
    with trained.sync(engine.url, transport="disk", directory=tmp_path / "sync") as sync:
        sync.push(81)
        with torch.no_grad():
            for parameter in trained.model.parameters():
                parameter.mul_(1.1)
        monkeypatch.setattr(disk, "write_file", wrong)
        with pytest.raises(WeightPushError, match=message):
            sync.push(82)
        assert not (tmp_path / "sync").exists()
        if wrong is torn:
            assert post(engine.url).status_code == 503
        monkeypatch.undo()
        sync.push(83)
        assert trained.gap(sync) < 1e-4
    assert generate(engine.url)["meta_info"]["weight_version"] == "83"
