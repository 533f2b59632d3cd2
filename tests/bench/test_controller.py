"""`arpo bench controller`, shortened: nothing is lost, and a failed request costs only its own repeat."""

import asyncio
import gc
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arpo_megatron.bench import controller
from arpo_megatron.bench.stub_engine import FAILURES
from arpo_megatron.bench.tool_calling_model import write_model

TREES = 8
PROBES = 5
"""Requests that time prefills when the gate opens, and the one for the prefix that all prompts share."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


def run(model: Path, failure_share: float) -> controller.ControllerRun:
    """Grow trees; callbacks are measured in CPU time, which other load on the machine does not change.

    Python's garbage collector does not visit what other tests have left: that takes it up to a second.
    """
    gc.collect()
    gc.freeze()
    try:
        return asyncio.run(controller.run_controller(model, TREES, failure_share, answer_s=0.02))
    finally:
        gc.unfreeze()


def test_segment_is_one_request_and_blocks_nothing(model: Path) -> None:
    found = run(model, 0.0)
    assert (found.finished, found.trajectories, found.failed) == (TREES, 16 * TREES, 0)
    assert found.segments + TREES <= found.requests <= found.segments + TREES + PROBES
    assert found.bytes_per_request < 6.5 * 120 + 250, "6 bytes and a comma for each token, and the parameters"
    assert found.blocked == 0
    assert found.longest_wait_ms < 1000, "generous: a callback that waits for a moment may then wait for a CPU"


def test_callbacks_that_wait_or_compute_are_noticed() -> None:
    async def wait() -> None:
        await asyncio.sleep(0)
        time.sleep(0.2)

    async def compute() -> None:
        await asyncio.sleep(0)
        began = time.thread_time()
        while time.thread_time() < began + 0.1:
            pass

    with controller.timed_callbacks() as found:
        asyncio.run(wait())
    assert max(found.long, default=0.0) < 0.1 < found.longest_wait_s
    with controller.timed_callbacks() as found:
        asyncio.run(compute())
    assert max(found.long) >= 0.1


def test_failed_requests_cost_their_own_repeats_and_lose_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "DEADLINE_S", 1.0)
    found = run(model, 0.02)
    assert found.finished == TREES
    assert found.trajectories == 16 * TREES
    assert found.lost == ()
    assert found.failed > 2 * len(FAILURES)
    assert found.requests <= found.segments + TREES + PROBES + found.failed


def test_peak_memory_is_that_of_the_process_alone() -> None:
    """A child has the `ru_maxrss` of its parent, which is larger here."""
    parent = bytearray(b"x" * 2**28)
    code = "from arpo_megatron.bench.memory import highest; print(highest())"
    child = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert 0 < int(child.stdout) < len(parent)
