"""Interrupted, failing and concurrent submissions: a run is submitted completely or not at all."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from arpo_megatron.cluster import runs
from arpo_megatron.cluster.code_snapshot import ROOT, Code
from arpo_megatron.cluster.submissions import submissions_of
from arpo_megatron.cluster.submit import Submission, prepare_submission, submit_jobs
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve, run_directory
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.utils.signals import Interrupted, interrupt_on_signals
from tests.cluster.stand_in import PLAIN, Queue, profile


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    stand_in = Queue(takes=9)
    monkeypatch.setattr("arpo_megatron.cluster.submit.submit_one", stand_in.send)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", stand_in.call)
    return stand_in


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Signal handlers of the command line."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    interrupt_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def prepared(tmp_path: Path, *, chain: int = 1, resume: bool = False, requeue: bool = True) -> Submission:
    job = resolve.resolve("quickstart", overrides=["platform=cpu"])
    return prepare_submission(job, profile(runs=str(tmp_path), requeue=requeue), nodes=1, chain=chain, resume=resume)


def with_ctrl_c(send: Callable[[Submission, Code], str], at: int, *, taken: bool) -> Callable[[Submission, Code], str]:
    """Wrap `send` with an interrupt at job number `at`, before Slurm accepts it or while it does."""
    sent: list[str] = []

    def interrupted(submission: Submission, code: Code) -> str:
        if len(sent) + 1 == at and not taken:
            raise Interrupted  # at once; a real interrupt waits for the answer
        sent.append(send(submission, code))
        if len(sent) == at:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # users press it repeatedly
        return sent[-1]

    return interrupted


def files_of(run: RunDirectory) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_interrupt_cancels_and_records_accepted_jobs(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.submit.submit_one", with_ctrl_c(queue.send, 2, taken=True))
    submission = prepared(tmp_path, chain=3)
    with pytest.raises(Interrupted) as interrupt:
        submit_jobs(submission)
    assert str(interrupt.value) == f"cancelled job 4711, 4712; arpo resume {submission.run.path} submits it again"
    assert queue.jobs == {"4711": "CANCELLED", "4712": "CANCELLED"}
    assert [each["jobs"] for each in submissions_of(runs.find_run(str(submission.run.path)))] == [["4711", "4712"]]


def test_second_interrupt_does_not_stop_the_cancellation(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*arguments: str, check: bool = True, ignore: str | None = None) -> str:
        if arguments[0] in ("scancel", "scontrol"):
            signal.raise_signal(signal.SIGINT)
        return queue.call(*arguments, check=check, ignore=ignore)

    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", call)
    with pytest.raises(Interrupted, match="cancelled job 4711; arpo resume"):
        submit_jobs(prepared(tmp_path, chain=2, requeue=False))
    assert queue.jobs == {"4711": "CANCELLED"}


def test_job_that_cannot_be_cancelled_after_an_interrupt_is_reported(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.cancels = False
    monkeypatch.setattr("arpo_megatron.cluster.submit.submit_one", with_ctrl_c(queue.send, 1, taken=True))
    with pytest.raises(Interrupted, match=r"scancel did not answer .*: cancel the accepted jobs \(4711\)"):
        submit_jobs(submission := prepared(tmp_path))
    queue.cancels = True
    runs.cancel(submission.run)
    assert queue.jobs == {"4711": "CANCELLED"}


def test_interrupt_before_sbatch_removes_the_run(queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.submit.submit_one", with_ctrl_c(queue.send, 1, taken=False))
    with pytest.raises(Interrupted):
        submit_jobs(first := prepared(tmp_path))
    assert not first.run.path.exists()
    assert prepared(tmp_path).run == first.run, "the next one has its name"


@pytest.mark.parametrize("at", ["save_config", "save_profile", "_nemo_run"])
@pytest.mark.parametrize("fault", [Interrupted(), OSError(28, "No space left on device")])
def test_error_while_writing_a_run_restores_it(
    at: str, fault: BaseException, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise fault

    expected = Interrupted if isinstance(fault, Interrupted) else UserError
    submit_jobs(prepared(tmp_path))
    queue.jobs["4711"] = "COMPLETED"
    (resumed := prepared(tmp_path, resume=True)).run.logs.rmdir()
    before = files_of(resumed.run)
    monkeypatch.setattr(f"arpo_megatron.cluster.submit.{at}", fail)
    with pytest.raises(expected):
        submit_jobs(resumed)
    assert files_of(resumed.run) == before and not resumed.run.logs.exists()
    with pytest.raises(expected):
        submit_jobs(fresh := prepared(tmp_path))
    assert fresh.run != resumed.run and not fresh.run.path.exists()


def test_concurrent_submissions_of_a_run_submit_once(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two concurrent commands that both prepared the same submission."""
    messages: list[str] = []

    def send(submission: Submission, code: Code) -> str:
        with pytest.raises(UserError, match="is being submitted by another command") as refused:
            submit_jobs(others.pop())
        messages.append(str(refused.value))
        return queue.send(submission, code)

    monkeypatch.setattr("arpo_megatron.cluster.submit.submit_one", send)
    others, late = [prepared(tmp_path)], prepared(tmp_path)
    submit_jobs(first := prepared(tmp_path))
    with pytest.raises(UserError, match="already holds a run"):
        submit_jobs(late)
    queue.jobs["4711"] = "COMPLETED"
    others, late = [prepared(tmp_path, resume=True)], prepared(tmp_path, resume=True)
    submit_jobs(prepared(tmp_path, resume=True))
    with pytest.raises(UserError, match=r"job 4712 of .* is in the queue"):
        submit_jobs(late)
    assert len(messages) == 2
    assert [each["jobs"] for each in submissions_of(first.run)] == [["4711"], ["4712"]]
    assert not (first.run.path / run_directory.SUBMIT_LOCK).exists()


def test_directory_with_other_files_is_not_changed(queue: Queue, tmp_path: Path) -> None:
    (logs := tmp_path / "mine" / "logs").mkdir(parents=True)
    (logs / "precious").write_text("")
    job = resolve.resolve("quickstart", overrides=["platform=cpu", f"run_dir={tmp_path / 'mine'}"])
    with pytest.raises(UserError, match="holds other files"):
        submit_jobs(prepare_submission(job, profile(runs=str(tmp_path)), nodes=1))
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "logs", "precious"]


SBATCH = """#!/bin/bash
[ "$1" = --version ] && exit
echo taken >"$0.taken"
sleep 2
echo 4711
"""
SCANCEL = """#!/bin/bash
echo "$@" >>"$0.arguments"
"""


def test_ctrl_c_does_not_reach_sbatch(tmp_path: Path) -> None:
    """The whole command with stand-ins for Slurm: sbatch has the job, but has not answered yet."""
    tools, runs = tmp_path / "bin", tmp_path / "runs"
    tools.mkdir()
    for name, text in {"sbatch": SBATCH, "scancel": SCANCEL}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (cluster := tmp_path / "mine.yaml").write_text(yaml.safe_dump({**PLAIN, "runs": str(runs), "gpus_per_node": 0}))
    arguments = ["submit", "quickstart", "platform=cpu", "--cluster", str(cluster)]
    with subprocess.Popen(
        [sys.executable, "-m", "arpo_megatron", *arguments],
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as command:
        while not (tools / "sbatch.taken").exists() and command.poll() is None:
            time.sleep(0.05)
        os.killpg(command.pid, signal.SIGINT)
        error = command.communicate()[1]
    (name,) = [path.name for path in runs.iterdir()]
    assert error == f"arpo: interrupted; cancelled job 4711; arpo resume {runs / name} submits it again\n"
    assert command.returncode == 130
    assert (tools / "scancel.arguments").read_text() == "4711\n"
    assert submissions_of(RunDirectory(runs / name))[0]["jobs"] == ["4711"]
