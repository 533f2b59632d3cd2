"""Services that are killed during training are restarted up to `engine.restarts` times, and cost time only.

Their requests are repeated, weights are pushed again, and trees continue from where they were.
"""

import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.jobs import (
    ARPO,
    SHORT,
    TASKS,
    check_kept,
    check_steps,
    journal_of,
    kill_service,
    quickstart,
    rows_of,
    unfinished,
)

pytestmark = pytest.mark.timeout(1600)  # the first test waits for the shared cold start

STEPS = 3


@pytest.mark.slow_campaign
def test_run_survives_killed_services(warm_run: Path) -> None:
    command = quickstart("train", warm_run, f"train.steps={STEPS}", *SHORT, "rollout.journal_every_s=0.1")
    with (
        (warm_run.parent / "screen").open("wb") as screen,
        subprocess.Popen([*command, "engine.restarts=3"], stderr=screen) as job,
    ):
        wait_for_samples(warm_run, 1, job)  # in step 1 a restarted engine would have the weights already
        kill_service(job.pid, "arpo_megatron.engine.server.main")
        kill_service(job.pid, "tools_sandbox")
        kill_service(job.pid, "arpo_megatron.rollout.worker")
        shown = health_after(3, warm_run)
        assert job.wait(300) == 0, (warm_run.parent / "screen").read_text()[-3000:]
    check_steps(warm_run, STEPS)
    notes = [str(event["text"]) for event in rows_of(warm_run / "events.jsonl") if event["kind"] == "note"]
    assert any("the weights are pushed again" in text for text in notes), notes
    health = {line.split()[0]: line for line in shown}
    assert health.keys() == {"process", "sandbox", "engine", "rollout", "train"}
    assert all("was killed by SIGKILL" in health[name] for name in ("sandbox", "engine", "rollout"))
    assert not (warm_run / "health.json").exists()


@pytest.mark.slow_campaign
def test_run_ends_at_the_restart_limit_and_resumes(warm_run: Path) -> None:
    command = quickstart("train", warm_run, f"train.steps={STEPS}", *SHORT, "rollout.journal_every_s=0.1")
    with (warm_run.parent / "screen").open("wb") as screen:
        with subprocess.Popen([*command, "engine.restarts=1"], stderr=screen) as job:
            wait_for_steps(warm_run, 1, job)
            kill_service(job.pid, "arpo_megatron.rollout.worker")
            health_after(1, warm_run)
            wait_for_samples(warm_run, 2, job)
            kill_service(job.pid, "arpo_megatron.engine.server.main")
            assert job.wait(240) == 1
        text = (warm_run.parent / "screen").read_text()
        assert "was killed by SIGKILL, after 1 restarts of services within an hour (engine.restarts); log: " in text
        assert "Traceback" not in text.split("log:")[0]
        left = unfinished(warm_run)
        assert len(left) == TASKS
        assert subprocess.run([*command, "--resume"], stderr=screen, timeout=300).returncode == 0
    check_steps(warm_run, STEPS)
    check_kept(warm_run, left)


@pytest.mark.slow_campaign
def test_colocated_engine_killed_while_its_memory_is_lent_stays_down_until_the_push(warm_run: Path) -> None:
    overrides = ["train.steps=2", "engine.placement=colocated", "rollout.max_staleness=1"]
    command = quickstart("train", warm_run, *overrides, *SHORT)
    with (warm_run.parent / "screen").open("wb") as screen, subprocess.Popen(command, stderr=screen) as job:
        while not (warm_run / "memory_lent").exists():
            assert job.poll() is None, "the job ended too early"
            time.sleep(0.002)
        kill_service(job.pid, "arpo_megatron.engine.server.main")
        assert job.wait(240) == 0, (warm_run.parent / "screen").read_text()[-3000:]
    rows = rows_of(warm_run / "metrics.jsonl")
    assert [row["trees"] for row in rows] == [TASKS] * 2
    gaps = [row["logprob_gap"] for row in rows]
    assert all(gap is None or gap < 1e-3 for gap in gaps)  # older weights may have sampled all of a step
    assert all(row["seconds/lend"] > 0 for row in rows)
    restarts = [str(event["text"]) for event in rows_of(warm_run / "events.jsonl") if event["kind"] == "restart"]
    assert [text.partition(" in ")[0] for text in restarts] == [
        "engine was killed by SIGKILL; restart 1 of 10",
        "engine is up again",
    ]
    assert not (warm_run / "memory_lent").exists()


def wait_for_steps(run: Path, count: int, job: "subprocess.Popen[bytes]") -> None:
    while len(rows_of(run / "metrics.jsonl")) < count:
        assert job.poll() is None, "the job ended too early"
        time.sleep(0.02)


def wait_for_samples(run: Path, step: int, job: "subprocess.Popen[bytes]") -> None:
    """Wait until the journal of the step after `step` has more than the prefills of its prompts."""
    while (snapshot := journal_of(run, step)) is None or snapshot.entries < 8 * TASKS:
        assert job.poll() is None, "the job ended too early"
        time.sleep(0.02)


def health_after(restarts: int, run: Path) -> list[str]:
    """Return the lines of `arpo health` after the event log has that many restarts."""
    while sum("; restart " in str(event.get("text")) for event in rows_of(run / "events.jsonl")) < restarts:
        time.sleep(0.02)
    done = subprocess.run([*ARPO, "health", str(run)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
