"""For all tests: processes share the cores, and one process alone can be Megatron's whole world."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from arpo_megatron.hardware.environment import CPU_ENVIRONMENT

pytest_plugins = ("tests.engine.fixtures",)

# Before anything imports torch, whose OpenMP reads it once. Tests that need a GPU run with ARPO_TESTS_ON=cuda, and
# only they: the others count on gloo.
if os.environ.get("ARPO_TESTS_ON") != "cuda":
    os.environ.update(CPU_ENVIRONMENT)

# A machine that does other work is slow now and then: no deadlines. `make test` draws the same examples each time, so
# that it says something about the change and nothing about luck; `make fuzz` draws new ones, and keeps what fails.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("new", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")


LONGEST_FIRST = ("tests/e2e/", "tests/study/", "tests/rollout/", "tests/cluster/", "tests/bench/", "tests/actor/")
WITH_THE_DEMO = ("demo", "engine_death", "interruption", "job_variants")
"""Files of tests/e2e that use the demo, which is trained once."""


class SharedFixturesScheduling(LoadScopeScheduling):
    """What one worker runs: the tests that share the demo, and otherwise a file with its fixtures."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "with the demo" if file in {f"tests/e2e/test_{name}.py" for name in WITH_THE_DEMO} else file


CAMPAIGNS = {
    "slow_campaign": "minutes of kills and restarts, or a GPU's figures: make test-slow",
    "slurm_campaign": "about an hour of this machine: make test-slurm",
}
ONEBOX = Path(__file__).resolve().parents[1] / "slurm" / "onebox" / "onebox.sh"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long comes first, so that no worker is left alone with it in the end; too long, and it is skipped."""

    def place(item: pytest.Item) -> tuple[bool, int]:
        folders = [index for index, folder in enumerate(LONGEST_FIRST) if item.nodeid.startswith(folder)]
        return not item.nodeid.startswith("tests/e2e/test_demo"), min(folders, default=len(LONGEST_FIRST))

    items.sort(key=place)
    for campaign, reason in CAMPAIGNS.items():
        own = [item for item in items if item.get_closest_marker(campaign)]
        if own and campaign not in config.option.markexpr:
            mark = pytest.mark.skip(reason=(campaign == "slurm_campaign" and _why_no_slurm()) or reason)
            for item in own:
                item.add_marker(mark)


def _why_no_slurm() -> str:
    done = subprocess.run([ONEBOX, "installable"], capture_output=True, text=True)
    return f"no Slurm: {' '.join(done.stderr.split())}" if done.returncode else ""


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
