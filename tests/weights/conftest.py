"""One engine of two ranks for all tests of pushes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from arpo_megatron.engine.launch import EngineHandle, launch_engine
from tests.models.tiny_models import make
from tests.weights.pushes import LAYERS, SIZES, add_tokenizer


@pytest.fixture(scope="session")
def engine_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engine") / "model"
    make(directory, "qwen3-tied", num_hidden_layers=LAYERS)
    add_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def engine(engine_model: Path) -> Iterator[EngineHandle]:
    """Each test leaves it open: with weights of a whole push."""
    log = engine_model.parent / "log"
    with launch_engine(engine_model, SIZES, dtype="float32", seed=1, log_path=log) as handle:
        yield handle
