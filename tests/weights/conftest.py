"""Modules beside these tests (tiny_models.py) are imported by name, by the tests and by the torchrun script."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Megatron's parallel state for a world of this process alone."""
    from arpo_megatron.actor import parallel
    from arpo_megatron.config import ParallelConfig

    parallel.initialize(ParallelConfig(), seed=1)
    yield
    parallel.destroy()
