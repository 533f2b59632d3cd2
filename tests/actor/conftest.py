"""Modules beside these tests (reference.py, cases.py) are imported by name, by the tests and by the torchrun script."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For models this small a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_rank(one_thread: None) -> Iterator[None]:
    """Megatron's parallel state for a world of this process alone."""
    from arpo_megatron.actor import parallel
    from arpo_megatron.config import ParallelConfig

    parallel.initialize(ParallelConfig(), seed=1)
    torch.set_num_threads(1)
    yield
    parallel.destroy()
