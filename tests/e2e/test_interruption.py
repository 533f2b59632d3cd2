"""Ctrl-C at any moment leaves nothing running and nothing half-written; --resume goes on from the last step."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from jobs import SHORT, quickstart, rows_of, run_to_end

pytestmark = pytest.mark.timeout(1600)  # the first test of a session waits for the demo

END_S = 15.0
TASKS = 4

Job = subprocess.Popen[str]
Start = Callable[[list[str]], Job]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a job in the background; one that a failing test leaves is killed, and its roles die with it."""
    jobs: list[Job] = []

    def start_job(command: list[str]) -> Job:
        jobs.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.kill()
        job.communicate()


def training(run: Path, *extra: str, steps: int = 3) -> list[str]:
    return quickstart("train", run, f"train.steps={steps}", *SHORT, *extra)


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


def family_of(job: Job) -> list[psutil.Process]:
    return psutil.Process(job.pid).children(recursive=True)


def alive(family: list[psutil.Process], run: Path) -> list[psutil.Process]:
    """What still runs of a job's processes."""
    left = [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    return left + processes_of(run)


def wait_for(what: str, condition: Callable[[], object], job: Job, within_s: float = 240.0) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return
        assert job.poll() is None, f"the job ended before {what}: {job.communicate()[1]}"
        time.sleep(0.01)
    raise AssertionError(f"no {what} within {within_s:g} s")


def in_phase(run: Path, name: str, step: int) -> bool:
    return any(event.get("name") == name and event["step"] == step for event in rows_of(run / "events.jsonl"))


def interrupt(job: Job, run: Path) -> str:
    """Ctrl-C, as a terminal sends it; returns what the job said."""
    family = family_of(job)
    os.killpg(job.pid, signal.SIGINT)
    started = time.monotonic()
    _, said = job.communicate(timeout=60)
    assert time.monotonic() - started < END_S
    assert job.returncode == 130, said
    assert "--resume goes on from the last step" in said
    assert not alive(family, run)
    assert not list(run.rglob("*.tmp"))
    return said


def test_ctrl_c_in_a_rollout_and_resume(start: Start, warm_run: Path) -> None:
    job = start(training(warm_run))
    wait_for("rollout of step 2", lambda: in_phase(warm_run, "rollout", 1), job)
    interrupt(job, warm_run)
    said = run_to_end(training(warm_run, "--resume"), warm_run)
    assert "resumed from step_1" in said
    assert [row["step"] for row in rows_of(warm_run / "metrics.jsonl")] == [1, 2, 3]
    assert (warm_run / "export" / "config.json").exists()


@pytest.mark.parametrize(
    ("log", "words"),
    [("sandbox.log", ""), ("engine.log", ""), ("engine.log", "Load weight begin")],
    ids=["tool-service-starts", "engine-starts", "engine-loads"],
)
def test_ctrl_c_while_engine_and_tools_start(start: Start, warm_run: Path, log: str, words: str) -> None:
    job, path = start(training(warm_run)), warm_run / "logs" / log
    wait_for(f"{words!r} in {path}", lambda: path.exists() and words in path.read_text(), job)
    interrupt(job, warm_run)
    assert not (warm_run / "logs" / "train.log").exists(), "the moment was missed: the trainer had started"


@pytest.mark.parametrize("phase", ["save", "export"])
def test_ctrl_c_while_files_are_written(start: Start, warm_run: Path, phase: str) -> None:
    job = start(training(warm_run, steps=1))
    wait_for(phase, lambda: in_phase(warm_run, phase, 1), job)
    interrupt(job, warm_run)


def test_ctrl_c_in_the_cold_start_and_resume(start: Start, tmp_path: Path) -> None:
    run, words = tmp_path / "run", ["sft.steps=400", "sft.batch=8", "sft.save_every=20"]
    checkpoints = run / "sft_checkpoints"
    job = start(training(run, *words))
    wait_for("first checkpoint", (checkpoints / "step_20").exists, job)
    wait_for("writing of the second", (checkpoints / "step_40.tmp").exists, job)
    interrupt(job, run)

    job, seen = start(training(run, *words, "--resume")), len(updates(run))
    wait_for("updates of the resumed cold start", lambda: len(updates(run)) > seen, job)
    said = interrupt(job, run)
    assert re.search(r"cold start resumed after (20|40) of 400", said), said


def updates(run: Path) -> list[object]:
    return [event for event in rows_of(run / "events.jsonl") if event["kind"] == "cold_start"]


@pytest.mark.parametrize("victim", ["arpo_megatron.rollout.sglang_main", "tools_sandbox"])
def test_a_killed_service_ends_the_job_and_names_its_log(start: Start, warm_run: Path, victim: str) -> None:
    job = start(training(warm_run))
    wait_for("rollout of step 1", lambda: in_phase(warm_run, "rollout", 0), job)
    ends_after_kill(job, warm_run, victim)


def test_a_killed_rank_ends_the_job_and_no_step_is_lost(start: Start, warm_run: Path) -> None:
    """It dies between a step's record and its checkpoint, whichever the loop writes first."""
    job = start(training(warm_run))
    record, checkpoint = warm_run / "metrics.jsonl", warm_run / "checkpoints" / "step_2"
    wait_for("end of step 2", lambda: len(rows_of(record)) == 2 or checkpoint.exists(), job)
    ends_after_kill(job, warm_run, "arpo_megatron.train")

    said = run_to_end(training(warm_run, "--resume"), warm_run)
    assert re.search(r"resumed from step_[12]", said), said
    assert [row["step"] for row in rows_of(record)] == [1, 2, 3]
    trees = sorted((warm_run / "trees").iterdir())
    assert [path.name for path in trees] == [f"step_00000{step}.jsonl" for step in (1, 2, 3)]
    assert all(len(rows_of(path)) == TASKS for path in trees)


def ends_after_kill(job: Job, run: Path, module: str) -> None:
    """Kill -9 the process that runs `python -m module`; the whole job must end and name a log."""
    family = family_of(job)
    running = [process for process in family if runs(process.cmdline(), module)]
    assert len(running) == 1
    running[0].kill()
    _, said = job.communicate(timeout=120)
    assert job.returncode == 1, said
    assert ".log" in said
    assert "Traceback" not in said.split("log:")[0]
    assert not alive(family, run)


def runs(command: list[str], module: str) -> bool:
    """Whether it is `python -m module ...` itself; torchrun names the module of its ranks further on."""
    return command[1:3] == ["-m", module]


def test_a_killed_command_line_takes_every_role_with_it(start: Start, warm_run: Path) -> None:
    job = start(training(warm_run))
    wait_for("rollout of step 1", lambda: in_phase(warm_run, "rollout", 0), job)
    family = family_of(job)
    assert len(family) >= 5
    job.kill()
    job.communicate()
    deadline = time.monotonic() + END_S
    while alive(family, warm_run) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(family, warm_run)
