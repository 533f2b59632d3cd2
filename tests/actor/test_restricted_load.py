"""A checkpoint cannot run code, wherever in it the code is."""

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from arpo_megatron.errors import UserError
from tests.actor import cases
from tests.actor.test_actor import new_actor

pytestmark = pytest.mark.usefixtures("one_rank")


class Code:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.mark,)


def metadata_of(checkpoint: Path) -> Any:
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def into_metadata(checkpoint: Path, code: Code) -> None:
    metadata = metadata_of(checkpoint)
    metadata.planner_data = code
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def into_common_state(checkpoint: Path, code: Code) -> None:
    common = torch.load(checkpoint / "common.pt")
    torch.save({**common, "updates": code}, checkpoint / "common.pt")


def replace_object(checkpoint: Path, name: str, content: Any) -> None:
    """Append an object to the file of shards, and let the metadata refer to it instead of an own one."""
    buffer, metadata = io.BytesIO(), metadata_of(checkpoint)
    torch.save([content], buffer)
    index, stored = next((i, s) for i, s in metadata.storage_data.items() if name in i.fqn)
    file = checkpoint / stored.relative_path
    metadata.storage_data[index] = replace(stored, offset=file.stat().st_size, length=len(buffer.getvalue()))
    file.write_bytes(file.read_bytes() + buffer.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def into_object(checkpoint: Path, code: Code) -> None:
    replace_object(checkpoint, "rng/", code)


def into_module_state(checkpoint: Path, code: Code) -> None:
    """Transformer Engine unpickles the bytes in this tensor."""
    replace_object(checkpoint, "_extra_state", torch.frombuffer(bytearray(pickle.dumps(code)), dtype=torch.uint8))


@pytest.mark.parametrize("hide", [into_metadata, into_common_state, into_object, into_module_state])
def test_code_in_a_checkpoint_is_refused(tmp_path: Path, hide: Callable[[Path, Code], None]) -> None:
    actor, mark = new_actor(), tmp_path / "the code ran"
    (checkpoint := tmp_path / "checkpoint").mkdir()
    cases.save(actor, checkpoint)
    hide(checkpoint, Code(mark))
    with pytest.raises(UserError, match="may run code"):
        actor.load(checkpoint)
    assert not mark.exists()
