"""A job that is interrupted or killed leaves no process and no half-written file; --resume continues it."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.health import read_health
from tests.e2e.jobs import (
    AHEAD,
    SHORT,
    TASKS,
    Job,
    Start,
    check_kept,
    check_steps,
    journal_of,
    kill_service,
    quickstart,
    rows_of,
    run_to_end,
    unfinished,
    wait_for,
)
from tests.sockets import exposed, listening_ports

pytestmark = pytest.mark.timeout(1600)  # the first test waits for the shared cold start

END_S = 60.0  # a process that is not stopped stays for minutes
MOMENT_S = 5.0
SERVICES = {"engine": "arpo_megatron.engine.server.main", "sandbox": "tools_sandbox", "rollout": "rollout.worker"}


def training(run: Path, *extra: str, steps: int = 3) -> list[str]:
    return quickstart("train", run, f"train.steps={steps}", *SHORT, *extra)


def processes_of(run: Path) -> list[psutil.Process]:
    """Return every live process with the run directory in its command line or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            arguments = [*process.cmdline(), *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if process.pid != os.getpid() and any(str(run) in word for word in arguments):
            found.append(process)
    return found


def family_of(job: Job) -> list[psutil.Process]:
    return psutil.Process(job.pid).children(recursive=True)


def alive(family: list[psutil.Process], run: Path) -> list[psutil.Process]:
    """Return those of a job's processes that still run after a moment.

    torch's manager of shared memory ends by itself once its last client has gone.
    """
    give_up = time.monotonic() + MOMENT_S
    while (left := [*filter(runs, family), *processes_of(run)]) and time.monotonic() < give_up:
        time.sleep(0.05)
    return left


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it has just ended
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def updates(run: Path) -> list[object]:
    """Return the progress events of the cold start."""
    return [event for event in rows_of(run / "events.jsonl") if event["kind"] == "sft"]


def notes(run: Path) -> list[str]:
    """Return the notes in the event log."""
    return [str(event["text"]) for event in rows_of(run / "events.jsonl") if event["kind"] == "note"]


def in_phase(run: Path, name: str, step: int) -> bool:
    return any(event.get("name") == name and event["step"] == step for event in rows_of(run / "events.jsonl"))


def interrupt(job: Job, run: Path, *, codes: tuple[int, ...] = (130,)) -> str:
    """Send Ctrl-C as a terminal does, and return the job's terminal output.

    Args:
        codes: accepted exit codes; with 0 among them the job may have finished before the signal.
    """
    family = family_of(job)
    os.killpg(job.pid, signal.SIGINT)
    started = time.monotonic()
    _, screen = job.communicate(timeout=2 * END_S)
    assert time.monotonic() - started < END_S
    assert job.returncode in codes, screen
    assert job.returncode == 0 or "--resume continues from the last step" in screen
    assert not alive(family, run)
    assert not list(run.rglob("*.tmp"))
    return screen


def process_of(job: Job, module: str) -> psutil.Process:
    """Return the process that runs `python -m module` (not the launcher, which names it later)."""
    found = []
    for process in family_of(job):
        with suppress(psutil.Error):  # it has just ended
            if process.cmdline()[1:3] == ["-m", module]:
                found.append(process)
    (only,) = found
    return only


def check_sockets(processes: list[psutil.Process]) -> None:
    """Check that no other machine reaches a port of the job, and no other user its Unix sockets."""
    assert len(listening_ports(processes)) >= 7, "three services, gloo twice in engine and trainer, store of the push"
    assert not exposed(processes)


def causes_of_restarts(run: Path) -> dict[str, str]:
    """Return why services were last restarted."""
    with suppress(UserError):  # no service is up yet
        return {each.name: each.last_error for each in read_health(RunDirectory(run)) if each.restarts}
    return {}


def check_whole_job_ends(job: Job, run: Path, family: list[psutil.Process]) -> None:
    """Check that a job with a killed process ends, names a log, and leaves nothing."""
    _, screen = job.communicate(timeout=300)
    assert job.returncode == 1, screen
    assert ".log" in screen
    assert "Warning" not in screen, "warnings of libraries would hide the cause"
    assert "Traceback" not in screen.split("log:")[0]
    assert not alive(family, run)
    assert not list(run.rglob("*.tmp"))


def test_ctrl_c_and_killed_services_lose_no_step_and_no_token(start: Start, warm_run: Path) -> None:
    overrides = [*AHEAD, "rollout.journal_every_s=0.1"]
    job = start(training(warm_run, *overrides))
    wait_for("answers of step 2", lambda: (snapshot := journal_of(warm_run, 1)) and snapshot.entries > 3 * TASKS, job)
    wait_for("checkpoint of step 1", (warm_run / "checkpoints" / "step_1").exists, job)  # written while trees grow
    rank, family = process_of(job, "arpo_megatron.train"), family_of(job)
    rank.suspend()  # the step must not end meanwhile
    check_sockets([psutil.Process(job.pid), *family])
    rank.resume()
    interrupt(job, warm_run)
    first = unfinished(warm_run)

    job = start(training(warm_run, *overrides, "engine.restarts=3", "--resume"))
    wait_for("resumed training", lambda: "resumed from step_1: 1 steps are done" in notes(warm_run), job)
    wait_for("trees", lambda: any(note.startswith("step 2 continues with 8") for note in notes(warm_run)), job)
    wait_for("trees of step 3", lambda: in_phase(warm_run, "rollout", 2), job)
    for module in SERVICES.values():
        kill_service(job.pid, module)
    wait_for("restarts", lambda: causes_of_restarts(warm_run).keys() >= SERVICES.keys(), job)
    assert all("was killed by SIGKILL" in cause for cause in causes_of_restarts(warm_run).values())
    _, screen = job.communicate(timeout=300)
    assert job.returncode == 0, screen
    assert not (warm_run / "health.json").exists()
    check_steps(warm_run, 3)
    assert len(first) == 2 * TASKS  # those of the step, and those ahead of it
    check_kept(warm_run, first)
    assert (warm_run / "export" / "config.json").exists()


@pytest.mark.slow_campaign
def test_killed_rank_ends_the_job_and_resume_loses_no_step_and_no_token(start: Start, warm_run: Path) -> None:
    overrides = [*AHEAD, "rollout.journal_every_s=0.1"]
    job = start(training(warm_run, *overrides))
    record, checkpoint = warm_run / "metrics.jsonl", warm_run / "checkpoints" / "step_2"
    wait_for("checkpoint of step 1", (warm_run / "checkpoints" / "step_1").exists, job)
    rank, family = process_of(job, "arpo_megatron.train"), family_of(job)
    # Kill between the step's metrics row and its checkpoint, whichever is written first.
    wait_for("end of step 2", lambda: len(rows_of(record)) == 2 or checkpoint.exists(), job, every_s=0.001)
    rank.kill()
    check_whole_job_ends(job, warm_run, family)
    left = unfinished(warm_run)
    assert len(left) in (TASKS, 2 * TASKS)  # the checkpoint of step 2 was there, or not

    run_to_end(training(warm_run, *overrides, "--resume"), warm_run)
    check_steps(warm_run, 3)
    check_kept(warm_run, left)


@pytest.mark.slow_campaign
def test_killed_rank_is_resumed_by_the_job_itself(start: Start, warm_run: Path) -> None:
    job = start(training(warm_run, "--restarts", "1"))
    wait_for("checkpoint of step 1", (warm_run / "checkpoints" / "step_1").exists, job)
    process_of(job, "arpo_megatron.train").kill()
    _, screen = job.communicate(timeout=600)
    assert job.returncode == 0, screen
    (restart,) = [note for note in notes(warm_run) if "restart 1 of 1" in note]
    assert restart.startswith("train ended with exit code 137; log: ")  # the launcher of the ranks reports SIGKILL


@pytest.mark.slow_campaign
@pytest.mark.parametrize(
    ("log", "line"), [("sandbox.log", ""), ("engine.log", "Load weight begin")], ids=["tool-service", "engine"]
)
def test_ctrl_c_while_services_start(start: Start, warm_run: Path, log: str, line: str) -> None:
    job, path = start(training(warm_run)), warm_run / "logs" / log
    wait_for(f"{line!r} in {path}", lambda: path.exists() and line in path.read_text(), job)
    interrupt(job, warm_run)
    assert not (warm_run / "logs" / "train.log").exists(), "the trainer had started before the signal"


@pytest.mark.slow_campaign
def test_ctrl_c_in_sft_resumes_from_newest_whole_checkpoint(start: Start, tmp_path: Path) -> None:
    run, overrides = tmp_path / "run", ["sft.steps=400", "sft.batch=8", "sft.save_every=20"]
    checkpoints = run / "sft_checkpoints"
    job = start(training(run, *overrides))
    wait_for("first checkpoint", (checkpoints / "step_20").exists, job)
    second = checkpoints / "step_40"
    wait_for(
        "writing of the second", lambda: second.exists() or second.with_suffix(".tmp").exists(), job, every_s=0.001
    )
    interrupt(job, run)
    # The second; the first if the second was not whole yet; a later one if the signal came late.
    newest = max(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*[0-9]"))

    job, seen = start(training(run, *overrides, "--resume")), len(updates(run))
    wait_for("updates of the resumed cold start", lambda: len(updates(run)) > seen, job)
    screen = interrupt(job, run)
    assert f"cold start resumed after {newest} of 400" in screen


@pytest.mark.slow_campaign
def test_ctrl_c_in_export_leaves_whole_export_or_none(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = start(quickstart("sft", run, "sft.steps=1", "sft.batch=8"))
    wait_for("last update", lambda: updates(run), job)  # the export comes next
    interrupt(job, run, codes=(130, 0))
    assert job.returncode == 130 or (run / "sft").exists()
    if (run / "sft").exists():
        names = {path.name for path in (run / "sft").iterdir()}
        assert names >= {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.mark.slow_campaign
def test_killed_command_line_ends_all_processes_and_loses_no_token(start: Start, warm_run: Path) -> None:
    overrides = ["rollout.journal_every_s=0.1"]
    job = start(training(warm_run, *overrides, steps=1))
    wait_for("entries of step 1", lambda: (snapshot := journal_of(warm_run, 0)) and snapshot.entries > 3 * TASKS, job)
    family = family_of(job)
    assert len(family) >= 5
    job.kill()
    job.wait()
    deadline = time.monotonic() + END_S
    while alive(family, warm_run) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(family, warm_run)

    first = journal_of(warm_run, 0)
    assert first is not None
    run_to_end(training(warm_run, *overrides, "--resume", steps=1), warm_run)
    assert any(note.startswith(f"step 1 continues with {TASKS} trees") for note in notes(warm_run))
    check_kept(warm_run, first.trees)
    assert not (warm_run / "step_journal.msgpack").exists(), "training is done"
