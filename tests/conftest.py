"""For all tests: processes share the cores, and one process alone can be Megatron's whole world."""

import os
from collections.abc import Iterator

import pytest

from arpo_megatron.processes import CPU_ENVIRONMENT

# Before anything imports torch, whose OpenMP reads it once. Tests that need a GPU run with ARPO_TESTS_ON=cuda, and
# only they: the others count on gloo.
if os.environ.get("ARPO_TESTS_ON") != "cuda":
    os.environ.update(CPU_ENVIRONMENT)


def pytest_itemcollected(item: pytest.Item) -> None:
    """What one worker runs: the tests that share the demo, and otherwise a file with its module-wide fixtures."""
    demo = "demo" in getattr(item, "fixturenames", ())
    item.add_marker(pytest.mark.xdist_group("demo" if demo else item.nodeid.partition("::")[0]))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Megatron's parallel state for a world of this process alone, on one thread: enough for tiny models."""
    import torch

    from arpo_megatron.actor import parallel
    from arpo_megatron.config import ParallelConfig

    parallel.initialize(ParallelConfig(), seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    parallel.destroy()
