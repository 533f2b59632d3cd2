"""An engine or tool service that is killed during training costs time only: calls are made again, and trees go on
after the weights were pushed again."""

import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from jobs import ARPO, SHORT, quickstart, rows_of

pytestmark = pytest.mark.timeout(1600)  # the first test of a session waits for the demo

STEPS = 4
TASKS = 4


def test_training_survives_the_death_of_its_engine_and_its_tools(warm_run: Path) -> None:
    words = ["rollout.max_staleness=1", "algorithm.trajectory_weight_limit=2"]  # trees are under way at any moment
    command = quickstart("train", warm_run, f"train.steps={STEPS}", *SHORT, *words)
    with (warm_run.parent / "screen").open("wb") as screen, subprocess.Popen(command, stderr=screen) as job:
        for step in (1, 2):
            wait_for_steps(warm_run, step, job)
            kill(job.pid, "arpo_megatron.rollout.sglang_main")
        kill(job.pid, "tools_sandbox")
        shown = health_after(3, warm_run)
        assert job.wait(240) == 0, (warm_run.parent / "screen").read_text()[-3000:]
    rows = rows_of(warm_run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["trees"] == TASKS and not row["dropped/failed"] for row in rows)
    assert all(row["logprob_gap"] < 1e-3 for row in rows)
    told = [event["text"] for event in rows_of(warm_run / "events.jsonl") if event["kind"] == "note"]
    assert any("pushed again" in text or "made again" in text for text in told), told
    assert "restart 3 of" in (warm_run.parent / "screen").read_text()
    assert [line.split()[0] for line in shown] == ["role", "sandbox", "engine", "train"]
    assert all("was killed by SIGKILL" in line for line in shown[1:3])
    assert not (warm_run / "health.json").exists()


def test_a_colocated_engine_that_dies_while_its_memory_is_lent_stays_down_until_the_push(
    warm_run: Path,
) -> None:
    words = ["train.steps=2", "engine.placement=colocated", "rollout.max_staleness=1"]
    command = quickstart("train", warm_run, *words, *SHORT, "algorithm.trajectory_weight_limit=2")
    with (warm_run.parent / "screen").open("wb") as screen, subprocess.Popen(command, stderr=screen) as job:
        while not (warm_run / "memory_lent").exists():
            assert job.poll() is None, "the job ended too early"
            time.sleep(0.002)
        kill(job.pid, "arpo_megatron.rollout.sglang_main")
        assert job.wait(240) == 0, (warm_run.parent / "screen").read_text()[-3000:]
    rows = rows_of(warm_run / "metrics.jsonl")
    assert [row["trees"] for row in rows] == [TASKS] * 2
    assert all(row["logprob_gap"] < 1e-3 for row in rows)
    assert all(row["seconds/lend"] > 0 for row in rows)
    told = [str(event["text"]) for event in rows_of(warm_run / "events.jsonl") if event["kind"] == "restart"]
    assert [text.partition(" in ")[0] for text in told] == [
        "engine was killed by SIGKILL; restart 1 of 10",
        "engine is up again",
    ]
    assert not (warm_run / "memory_lent").exists()


def wait_for_steps(run: Path, count: int, job: "subprocess.Popen[bytes]") -> None:
    while len(rows_of(run / "metrics.jsonl")) < count:
        assert job.poll() is None, "the job ended too early"
        time.sleep(0.02)


def health_after(restarts: int, run: Path) -> list[str]:
    """The lines of `arpo health` once so many restarts were told."""
    while sum("; restart " in str(event.get("text")) for event in rows_of(run / "events.jsonl")) < restarts:
        time.sleep(0.02)
    done = subprocess.run([*ARPO, "health", str(run)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def kill(job: int, module: str) -> None:
    """kill -9 of the service and all its workers."""
    for process in psutil.Process(job).children(recursive=True):
        with suppress(psutil.Error):  # gone, or going
            if module in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)
