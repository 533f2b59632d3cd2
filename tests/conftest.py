"""For all tests: processes share the cores, and one process alone can be Megatron's whole world."""

import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from arpo_megatron.processes import CPU_ENVIRONMENT

# Before anything imports torch, whose OpenMP reads it once. Tests that need a GPU run with ARPO_TESTS_ON=cuda, and
# only they: the others count on gloo.
if os.environ.get("ARPO_TESTS_ON") != "cuda":
    os.environ.update(CPU_ENVIRONMENT)

# A machine that does other work is slow now and then.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")


class SharedFixturesScheduling(LoadScopeScheduling):
    """What one worker runs: the end-to-end tests, which share a demo, and otherwise a file with its fixtures."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "end to end" if file.startswith("tests/e2e/") else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The end-to-end tests first: together they take longest."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/e2e/"))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedFixturesScheduling:
    return SharedFixturesScheduling(config, log)


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
