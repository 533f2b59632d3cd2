"""Ctrl-C at any moment leaves nothing running and nothing half-written; --resume goes on from the last step."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.jobs import AHEAD, SHORT, check_kept, quickstart, rows_of, run_to_end, trained, under_way, unfinished

pytestmark = pytest.mark.timeout(1600)  # the first test of a session waits for the demo

END_S = 60.0  # a process that nobody ends stays for minutes
MOMENT_S = 600.0  # most seconds until a job reaches the moment of a test
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
        job.wait()


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
    left = []
    for process in family:
        with suppress(psutil.NoSuchProcess):  # it ends just now
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    return left + processes_of(run)


def wait_for(what: str, condition: Callable[[], object], job: Job, every_s: float = 0.01) -> None:
    deadline = time.monotonic() + MOMENT_S
    while time.monotonic() < deadline:
        if condition():
            return
        assert job.poll() is None, f"the job ended before {what}: {job.communicate()[1]}"
        time.sleep(every_s)
    raise AssertionError(f"no {what} within {MOMENT_S:g} s")


def updates(run: Path) -> list[object]:
    """The cold start's reports so far."""
    return [event for event in rows_of(run / "events.jsonl") if event["kind"] == "sft"]


def notes(run: Path) -> list[str]:
    """What the trainer said in words."""
    return [str(event["text"]) for event in rows_of(run / "events.jsonl") if event["kind"] == "note"]


def in_phase(run: Path, name: str, step: int) -> bool:
    return any(event.get("name") == name and event["step"] == step for event in rows_of(run / "events.jsonl"))


def interrupt(job: Job, run: Path, *, codes: tuple[int, ...] = (130,)) -> str:
    """Ctrl-C, as a terminal sends it; returns what the job said.

    `codes`: with 0 among them, the job may be at its end before it hears of it.
    """
    family = family_of(job)
    os.killpg(job.pid, signal.SIGINT)
    started = time.monotonic()
    _, said = job.communicate(timeout=2 * END_S)
    assert time.monotonic() - started < END_S
    assert job.returncode in codes, said
    assert job.returncode == 0 or "--resume goes on from the last step" in said
    assert not alive(family, run)
    assert not list(run.rglob("*.tmp"))
    return said


def process_of(job: Job, module: str) -> psutil.Process:
    """The process that runs `python -m module`; not torchrun, which names the module of its ranks further on."""
    found = []
    for process in family_of(job):
        with suppress(psutil.Error):  # one of a moment
            if process.cmdline()[1:3] == ["-m", module]:
                found.append(process)
    (only,) = found
    return only


def ends_by_itself(job: Job, run: Path, family: list[psutil.Process]) -> None:
    """One of its processes was killed: the whole job ends, names a log, and leaves nothing."""
    _, said = job.communicate(timeout=300)
    assert job.returncode == 1, said
    assert ".log" in said
    assert "Traceback" not in said.split("log:")[0]
    assert not alive(family, run)
    assert not list(run.rglob("*.tmp"))


def test_neither_ctrl_c_nor_a_killed_rank_costs_a_step_or_a_token(start: Start, warm_run: Path) -> None:
    words = [*AHEAD, "rollout.journal_every_s=0.1"]
    job = start(training(warm_run, *words))
    wait_for("answers of step 2", lambda: (moment := under_way(warm_run, 1)) and moment.entries > 3 * TASKS, job)
    wait_for("checkpoint of step 1", (warm_run / "checkpoints" / "step_1").exists, job)  # written while trees grow
    interrupt(job, warm_run)
    first = unfinished(warm_run)

    job = start(training(warm_run, *words, "--resume"))
    wait_for("resumed training", lambda: "resumed from step_1: 1 steps are done" in notes(warm_run), job)
    wait_for("trees", lambda: any(note.startswith("step 2 goes on where it was: 8") for note in notes(warm_run)), job)
    rank, family = process_of(job, "arpo_megatron.train"), family_of(job)
    record, checkpoint = warm_run / "metrics.jsonl", warm_run / "checkpoints" / "step_2"
    # The moment between a step's record and its checkpoint, whichever the loop writes first.
    wait_for("end of step 2", lambda: len(rows_of(record)) == 2 or checkpoint.exists(), job, every_s=0.001)
    rank.kill()
    ends_by_itself(job, warm_run, family)
    second = unfinished(warm_run)

    run_to_end(training(warm_run, *words, "--resume"), warm_run)
    assert [row["step"] for row in rows_of(record)] == [1, 2, 3]
    trees = sorted((warm_run / "trees").iterdir())
    assert [path.name for path in trees] == [f"step_00000{step}.parquet" for step in (1, 2, 3)]
    assert len({item.tree.task_id for item in trained(warm_run)}) == 3 * TASKS  # none lost, none twice
    assert len(first) == 2 * TASKS  # those of the step, and those ahead of it
    assert len(second) in (TASKS, 2 * TASKS)  # the checkpoint of step 2 was there, or not
    check_kept(warm_run, first)
    check_kept(warm_run, second)
    assert (warm_run / "export" / "config.json").exists()


@pytest.mark.parametrize(
    ("log", "words"),
    [("sandbox.log", ""), ("engine.log", "Load weight begin")],
    ids=["the-tool-service-starts", "the-engine-loads"],
)
def test_ctrl_c_while_engine_and_tools_start(start: Start, warm_run: Path, log: str, words: str) -> None:
    job, path = start(training(warm_run)), warm_run / "logs" / log
    wait_for(f"{words!r} in {path}", lambda: path.exists() and words in path.read_text(), job)
    interrupt(job, warm_run)
    assert not (warm_run / "logs" / "train.log").exists(), "the moment was missed: the trainer had started"


def test_ctrl_c_in_the_cold_start_and_resume(start: Start, tmp_path: Path) -> None:
    run, words = tmp_path / "run", ["sft.steps=400", "sft.batch=8", "sft.save_every=20"]
    checkpoints = run / "sft_checkpoints"
    job = start(training(run, *words))
    wait_for("first checkpoint", (checkpoints / "step_20").exists, job)
    second = checkpoints / "step_40"
    wait_for(
        "writing of the second", lambda: second.exists() or second.with_suffix(".tmp").exists(), job, every_s=0.001
    )
    interrupt(job, run)
    # The second, or the first where the other was not whole yet, or a later one where the signal came late.
    newest = max(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*[0-9]"))

    job, seen = start(training(run, *words, "--resume")), len(updates(run))
    wait_for("updates of the resumed cold start", lambda: len(updates(run)) > seen, job)
    said = interrupt(job, run)
    assert f"cold start resumed after {newest} of 400" in said, said


def test_ctrl_c_in_the_export_leaves_a_whole_one_or_none(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = start(quickstart("sft", run, "sft.steps=1", "sft.batch=8"))
    wait_for("last update", lambda: updates(run), job)  # the export comes next
    interrupt(job, run, codes=(130, 0))
    assert job.returncode == 130 or (run / "sft").exists()
    if (run / "sft").exists():
        names = {path.name for path in (run / "sft").iterdir()}
        assert names >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_killed_command_line_takes_every_role_with_it_and_nothing_that_was_sampled(
    start: Start, warm_run: Path
) -> None:
    words = ["rollout.journal_every_s=0.1"]
    job = start(training(warm_run, *words, steps=1))
    wait_for("entries of step 1", lambda: (moment := under_way(warm_run, 0)) and moment.entries > 3 * TASKS, job)
    family = family_of(job)
    assert len(family) >= 5
    job.kill()
    job.wait()
    deadline = time.monotonic() + END_S
    while alive(family, warm_run) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(family, warm_run)

    first = under_way(warm_run, 0)
    assert first is not None
    run_to_end(training(warm_run, *words, "--resume", steps=1), warm_run)
    assert any(note.startswith(f"step 1 goes on where it was: {TASKS} trees") for note in notes(warm_run))
    check_kept(warm_run, first.trees)
    assert not (warm_run / "step_journal.msgpack").exists(), "training is done"
