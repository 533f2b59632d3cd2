"""Ctrl-C at any moment leaves nothing running and nothing half-written; --resume goes on from the last step."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from jobs import ARPO, SEED

pytestmark = pytest.mark.timeout(1600)

WORDS = ["train.steps=3", "train.tasks_per_step=4", "evaluation.before=false", "evaluation.after=false"]
END_S = 15.0


def start(run: Path, *extra: str) -> "subprocess.Popen[str]":
    command = [*ARPO, "train", "quickstart", f"run_dir={run}", f"seed={SEED}", *WORDS, *extra]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def processes_of(run: Path) -> list[psutil.Process]:
    """Every live process that mentions the run directory, on its command line or in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if process.pid != os.getpid() and any(str(run) in word for word in words):
            found.append(process)
    return found


def wait_for(what: str, condition: object, within_s: float = 240.0) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {within_s:g} s")


def events(run: Path) -> list[dict[str, object]]:
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rolling_out(run: Path, steps_done: int) -> bool:
    return any(event.get("name") == "rollout" and event["step"] == steps_done for event in events(run))


def interrupt(job: "subprocess.Popen[str]", run: Path) -> str:
    family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    os.killpg(job.pid, signal.SIGINT)  # what a terminal does on ctrl-C
    started = time.monotonic()
    _, said = job.communicate(timeout=60)
    assert time.monotonic() - started < END_S
    assert job.returncode == 130
    left = [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not left + processes_of(run)
    assert not list(run.rglob("*.tmp"))
    return said


def test_ctrl_c_and_resume(warm_run: Path) -> None:
    job = start(warm_run)
    wait_for("first checkpoint", (warm_run / "checkpoints" / "step_1").exists)
    wait_for("rollout of step 2", lambda: rolling_out(warm_run, 1))
    said = interrupt(job, warm_run)
    assert "--resume goes on from the last step" in said
    done_before = len((warm_run / "metrics.jsonl").read_text().splitlines())

    again = start(warm_run, "--resume")
    _, said = again.communicate(timeout=400)
    assert again.returncode == 0, said
    assert f"resumed from step_{done_before}" in said
    rows = [json.loads(line) for line in (warm_run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert (warm_run / "export" / "config.json").exists()


@pytest.mark.parametrize("victim", ["sglang", "arpo_megatron.train", "tools_sandbox"])
def test_a_killed_role_ends_the_job_and_names_its_log(warm_run: Path, victim: str) -> None:
    job = start(warm_run)
    wait_for("first step", lambda: rolling_out(warm_run, 0))
    family = psutil.Process(job.pid).children(recursive=True)
    killed = [process for process in family if any(victim in word for word in process.cmdline())]
    killed[0].kill()
    _, said = job.communicate(timeout=120)
    assert job.returncode == 1, said
    assert ".log" in said
    assert "Traceback" not in said.split("log:")[0]
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] + processes_of(warm_run)


def test_a_killed_command_line_takes_every_role_with_it(warm_run: Path) -> None:
    job = start(warm_run)
    wait_for("first step", lambda: rolling_out(warm_run, 0))
    family = psutil.Process(job.pid).children(recursive=True)
    assert len(family) >= 5
    job.kill()
    job.communicate()
    wait_for("end of all roles", lambda: not processes_of(warm_run), within_s=END_S)
    left = [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not left
