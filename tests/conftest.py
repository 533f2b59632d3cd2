"""Shared by all tests: environment, hypothesis profiles, campaigns, and how pytest-xdist divides the files."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import absl.logging
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
# that a failure comes from the change and not from luck; `make fuzz` draws new ones, and keeps what fails.
hypothesis.settings.register_profile("same", max_examples=25, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("new", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")

# Uvicorn's set-up of logging closes all handlers. That of absl, which nemo-run imports, then closes its stream unless
# it is the process's own: pytest's capture, if it was imported in a test.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__

ONEBOX = Path(__file__).resolve().parents[1] / "slurm" / "onebox" / "onebox.sh"
LONGEST_FIRST = (
    # One of each kind for the workers that begin. The end-to-end tests share a cold start, which the first one makes.
    *("tests/e2e/test_demo.py", "tests/cluster/test_on_slurm.py", "tests/rollout/test_faults.py"),
    *("tests/actor/test_exactness.py", "tests/weights/test_push.py", "tests/rollout/test_trees_on_sglang.py"),
    *("tests/e2e/", "tests/engine/", "tests/tools_sandbox/test_load.py", "tests/tools_sandbox/test_attacks.py"),
    *("tests/weights/", "tests/actor/", "tests/evaluation/", "tests/rollout/"),
)
SHARED_ENGINES = {
    "tests/weights/test_push_faults.py": "tests/weights/test_push.py",
}
"""Files whose engine is that of another file: one worker runs both, so that it starts once."""
CAMPAIGNS = ("slow_campaign", "slurm_campaign")


class FileScheduling(LoadScopeScheduling):
    """Give a worker whole test files, so that the fixtures of a module are built once, and files of one engine."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return SHARED_ENGINES.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    return FileScheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--campaigns", action="store_true", help="run the campaigns too (`make test-all`)")
    parser.addoption("--any-order", action="store_true", help="add in random order, as a GPU may (tests/any_order.py)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--any-order"):
        from tests.ranks import ANY_ORDER_VARIABLE

        os.environ[ANY_ORDER_VARIABLE] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not item.config.getoption("--any-order"):
        return (yield)
    from tests.any_order import any_order

    with any_order():  # fixtures compute, too
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the longest folders, and leave the campaigns out unless they are asked for."""

    def rank(item: pytest.Item) -> int:
        folders = (index for index, folder in enumerate(LONGEST_FIRST) if item.nodeid.startswith(folder))
        return next(folders, len(LONGEST_FIRST))

    items.sort(key=rank)
    if config.getoption("--campaigns"):
        if reason := _why_no_slurm():
            for item in items:
                if item.get_closest_marker("slurm_campaign"):
                    item.add_marker(pytest.mark.skip(reason=reason))
        return
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in CAMPAIGNS)]
    named = any(name in config.option.markexpr for name in CAMPAIGNS) or any("::" in each for each in config.args)
    if left_out and not named:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _why_no_slurm() -> str:
    done = subprocess.run([ONEBOX, "installable"], capture_output=True, text=True)
    return f"no Slurm: {' '.join(done.stderr.split())}" if done.returncode else ""


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Build a directory once per run of pytest, whichever worker needs it first; the others wait for it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def build_once(name: str, build: Callable[[Path], None]) -> Path:
        path, done = root / name, root / f"{name}.done"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                path.mkdir()  # fails for every other test if the build has failed once
                build(path)
                done.touch()
        return path

    return build_once


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
