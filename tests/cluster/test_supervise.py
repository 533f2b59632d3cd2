"""How a job ends if Slurm refuses or does not answer.

Slurm is a stand-in, because a real one cannot be made to fail at these moments. (test_requeues.py has a requeue that a
real one refuses.)
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from arpo_megatron.cluster import supervise
from arpo_megatron.cluster.backend import NodeError, SlurmBackend
from arpo_megatron.cluster.profile import check_profile, load_profile, save_profile
from arpo_megatron.cluster.slurm import JobState, Node
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import StoppedError, UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.services import Job
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.monitor.progress import Progress
from arpo_megatron.plan.node_layout import NodeLayout
from arpo_megatron.utils.processes import ProcessDiedError
from arpo_megatron.utils.signals import Interrupted

NOBODYS = "99999999999"
"""A job id that no Slurm assigns."""
DISABLED = "scontrol requeue 7: Requested operation is presently disabled"

TAKEN_BACK = "scontrol requeue 7: Job is pending execution for job 7"


class Refusing:
    """Slurm with one running job; it refuses requeues."""

    def __init__(self, silent: str = "", refusal: str = DISABLED) -> None:
        self.silent, self.refusal = silent, refusal

    def call(self, *arguments: str, check: bool = True, ignore: str | None = None) -> str:
        if arguments[:2] == ("scontrol", "requeue"):
            raise UserError(self.refusal)
        if arguments[0] == self.silent:
            raise UserError(f"{arguments[0]} did not answer for 30 s")
        return "JobState=RUNNING " if "job" in arguments else ""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.submissions.mkdir()
    save_config(resolve.resolve("quickstart", overrides=["platform=cpu"]), directory.config)
    save_profile(check_profile({"account": "a", "runs": str(tmp_path), "gpus_per_node": 0}, "here"), directory.cluster)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Refusing().call)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.allocated_nodes", lambda names: [Node("n1", "127.0.0.1")])
    monkeypatch.setattr("arpo_megatron.cluster.backend.SlurmBackend.lost_nodes", lambda backend: ["n1"])
    return directory


def submitted(run: RunDirectory) -> None:
    (run.submissions / "1.json").write_text('{"jobs": ["7", "8"], "job_name": "arpo-test"}')


def ended(monkeypatch: pytest.MonkeyPatch, run: RunDirectory, error: BaseException | None) -> int:
    def stop(*_arguments: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(supervise, "_run", stop)
    monkeypatch.setattr(supervise, "interrupt_on_signals", lambda: None)
    warned: Sequence[int] = []
    return supervise.supervise(run.path, warned)


@pytest.mark.parametrize(
    ("error", "code"),
    [(StoppedError("saved"), 75), (Interrupted(15), 143), (ProcessDiedError("train was killed", 137), 137)],
)
def test_refused_requeue_is_one_line_and_keeps_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: RunDirectory,
    error: BaseException,
    code: int,
) -> None:
    assert ended(monkeypatch, run, error) == code
    assert capsys.readouterr().err.splitlines()[-1] == f"arpo: {DISABLED}; `arpo resume` continues the run"


def test_requeue_by_slurm_is_not_a_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Refusing(refusal=TAKEN_BACK).call)
    monkeypatch.setattr(supervise, "_END_S", 0.0)
    assert ended(monkeypatch, run, ProcessDiedError("train was killed", 137)) == 137
    assert capsys.readouterr().err.splitlines()[-1] == "arpo: requeueing the job"


def test_finished_job_succeeds_without_an_answer_from_slurm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    submitted(run)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Refusing(silent="squeue").call)
    assert ended(monkeypatch, run, None) == 0
    assert "squeue did not answer" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(StoppedError("saved"), 75), (Interrupted(15), 143)])
def test_requeue_is_tried_after_failed_queries(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: RunDirectory,
    error: BaseException,
    code: int,
) -> None:
    submitted(run)
    monkeypatch.setattr(supervise, "_PAUSE_S", 0.0)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.job_state", silence)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.job_states", silence)
    assert ended(monkeypatch, run, error) == code
    output = capsys.readouterr().err.splitlines()
    assert [line for line in output if "did not answer" in line] == ["arpo: scontrol did not answer for 30 s"] * 3
    assert output[-1] == f"arpo: {DISABLED}; `arpo resume` continues the run"


def silence(*_: object) -> NoReturn:
    raise UserError("scontrol did not answer for 30 s")


def test_signal_handler_only_records_the_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    signals = asked_by(monkeypatch, run, None)
    signals.receive(signal.SIGUSR1)
    assert run.stop.exists() and capsys.readouterr().err == ""
    signals.handle()
    assert "Slurm's warning: the trainer saves" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "cancelled"),
    [(UserError("No space left on device"), 2, ["8", "9"]), (ProcessDiedError("train was killed", 137), 137, [])],
)
def test_user_error_cancels_the_chain(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: RunDirectory,
    error: Exception,
    code: int,
    cancelled: list[str],
) -> None:
    """After another failure, the next job of the chain continues."""
    (run.submissions / "1.json").write_text('{"jobs": ["7", "8", "9"], "job_name": "arpo-test"}')
    asked: list[str] = []

    def call(*arguments: str, check: bool = True, ignore: str | None = None) -> str:
        if arguments[0] == "scancel":
            asked.append(arguments[1])
        return "7|RUNNING|arpo-test\n8|PENDING|arpo-test\n9|PENDING|arpo-test\n" if arguments[0] == "squeue" else ""

    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", call)
    monkeypatch.setattr("arpo_megatron.cluster.backend.SlurmBackend.lost_nodes", lambda backend: [])
    assert ended(monkeypatch, run, error) == code
    assert asked == cancelled
    output = capsys.readouterr().err.splitlines()
    assert output[-1] == f"arpo: {error}"
    assert ("arpo: cancelled the rest of the chain: job 8, 9" in output) is bool(cancelled)


SILENT = "doctor: report on n2: the node left none"


class Requeueing:
    """Slurm that accepts requeues and does not answer the first `silent` queries about nodes."""

    def __init__(self, silent: int = 0) -> None:
        self.silent = silent
        self.commands: list[tuple[str, ...]] = []

    def call(self, *arguments: str, check: bool = True, ignore: str | None = None) -> str:
        if arguments[0] == "scancel" or arguments[1] in ("requeue", "update"):
            self.commands.append(arguments)
        if arguments[0] == "sinfo":
            return "n1 alloc\nn2 down*\nn3 idle\n"
        if arguments[0] == "squeue":
            return "7|RUNNING|arpo-test\n8|PENDING|arpo-test\n"
        return ""

    def nodes(self, names: str) -> list[Node]:
        self.silent -= 1
        return silence() if self.silent >= 0 else [Node("n1", "127.0.0.1")]


WITHOUT_N2 = [
    ("scontrol", "update", "JobId=8", "ExcNodeList=n2"),
    ("scontrol", "requeue", "7"),
    ("scontrol", "update", "JobId=7", "ExcNodeList=n2"),
]


@pytest.mark.parametrize(
    ("lost", "values", "code", "commands"),
    [
        (["n2"], {}, 75, WITHOUT_N2),
        (["n2"], {"requeue": False}, 75, []),
        ([], {}, 2, [("scancel", "8")]),
        ([], {"restarts": 1}, 2, WITHOUT_N2),
    ],
)
def test_job_is_requeued_without_a_node_that_fails_before_training(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: RunDirectory,
    lost: list[str],
    values: dict[str, Any],
    code: int,
    commands: list[tuple[str, ...]],
) -> None:
    """Without `restarts`, a node that is alive but fails ends the chain."""
    submitted(run)
    save_profile(replace(load_profile(str(run.cluster)), **values), run.cluster)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", (slurm := Requeueing()).call)
    monkeypatch.setattr("arpo_megatron.cluster.backend.SlurmBackend.lost_nodes", lambda backend: lost)
    monkeypatch.setattr(supervise, "_END_S", 0.0)
    assert ended(monkeypatch, run, NodeError(SILENT, ["n2"])) == code
    assert slurm.commands == commands
    output = capsys.readouterr().err.splitlines()
    assert output.count(f"arpo: {SILENT}") == 1
    assert ("arpo: cannot reach n2 any more" in output) is bool(lost)


def test_missing_scratch_directory_of_a_lost_node_requeues_the_job(
    monkeypatch: pytest.MonkeyPatch, run: RunDirectory
) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.backend.SlurmBackend._on_nodes", lambda *_: None)
    backend = replace(asked_by(monkeypatch, run, None).backend, job_id=NOBODYS)
    with pytest.raises(NodeError, match="cannot be made on the nodes: no answer"), backend.prepared():
        pass


@pytest.mark.parametrize(
    ("silent", "requeue", "code", "commands"),
    [
        (2, True, 0, [("scancel", "8")]),  # training is done
        (9, True, 75, [("scontrol", "requeue", "7")]),
        (9, False, 75, []),
    ],
)
def test_silent_controller_at_the_start_requeues_the_job(
    monkeypatch: pytest.MonkeyPatch,
    run: RunDirectory,
    silent: int,
    requeue: bool,
    code: int,
    commands: list[tuple[str, ...]],
) -> None:
    submitted(run)
    save_profile(replace(load_profile(str(run.cluster)), requeue=requeue), run.cluster)
    slurm = Requeueing(silent)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", slurm.call)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.allocated_nodes", slurm.nodes)
    monkeypatch.setattr(supervise, "_PAUSE_S", 0.0)
    monkeypatch.setattr(supervise, "_END_S", 0.0)
    assert ended(monkeypatch, run, None) == code
    assert slurm.commands == commands


def asked_by(monkeypatch: pytest.MonkeyPatch, run: RunDirectory, state: JobState | None) -> supervise._Signals:
    monkeypatch.setattr("arpo_megatron.cluster.slurm.job_state", lambda job_id: state)
    backend = SlurmBackend(load_profile(str(run.cluster)), NodeLayout(1, 0, 1, 1, 0, 0, True), [], run, "7")
    return supervise._Signals(run, backend, Progress())


def test_term_saves_within_the_grace_time(monkeypatch: pytest.MonkeyPatch, run: RunDirectory) -> None:
    """Slurm sets the end of the job to the end of the grace time."""
    signals = asked_by(monkeypatch, run, JobState("7", "RUNNING", end=time.time() + 120))
    signals.receive(signal.SIGTERM)
    assert not run.stop.exists(), "it may be a cancellation"
    signals.handle()
    assert run.stop.exists()
    assert 90 < signals.deadline - time.monotonic() <= 100
    monkeypatch.setattr(time, "monotonic", lambda: signals.deadline + 1)
    with pytest.raises(Interrupted):
        signals.handle()


@pytest.mark.parametrize("state", [JobState("7", "CANCELLED"), JobState("7", "TIMEOUT"), None])
def test_term_ends_a_cancelled_job_at_once(
    monkeypatch: pytest.MonkeyPatch, run: RunDirectory, state: JobState | None
) -> None:
    signals = asked_by(monkeypatch, run, state)
    signals.receive(signal.SIGTERM)
    with pytest.raises(Interrupted):
        signals.handle()
    assert not run.stop.exists()


def test_processes_that_receive_term_do_not_fail_the_job(monkeypatch: pytest.MonkeyPatch, run: RunDirectory) -> None:
    """With proctrack/linuxproc even the steps' sruns get TERM."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ProcessDiedError("doctor was killed by SIGTERM", 143)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    monkeypatch.setattr(supervise, "_phases", die)
    made = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr("arpo_megatron.cluster.backend.SlurmBackend._on_nodes", lambda *_: made)
    signals = asked_by(monkeypatch, run, None)
    try:
        with pytest.raises(Interrupted):
            supervise._run(resolve.load(run.config), run, replace(signals.backend, job_id=NOBODYS), [], False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


OWED = """Pending RPC statistics
\tREQUEST_SIGNAL_TASKS                    ( 6004) count:2
\tREQUEST_TERMINATE_JOB                   ( 6011) count:1

Pending RPCs
\t 1: REQUEST_SIGNAL_TASKS                 n1
\t 2: REQUEST_SIGNAL_TASKS                 m[3-4]
\t 3: REQUEST_TERMINATE_JOB                n9
"""


@pytest.mark.parametrize(("restarts", "looks"), [(0, 0), (1, 3)])
def test_requeued_job_waits_for_pending_kills(
    monkeypatch: pytest.MonkeyPatch, run: RunDirectory, restarts: int, looks: int
) -> None:
    """Slurm repeats kills by step number, and new steps have the same numbers."""
    backend = replace(
        asked_by(monkeypatch, run, JobState("7", "RUNNING", restarts=restarts)).backend, nodes=[Node("n1", "")]
    )
    answers = [OWED, OWED, OWED.replace(" n1\n", " n2\n")]
    asked = []

    def call(*arguments: str) -> str:
        if arguments[0] == "sdiag":
            asked.append(arguments)
            return answers[len(asked) - 1]
        assert arguments == ("scontrol", "show", "hostnames", "n1,m[3-4]" if len(asked) < 3 else "n2,m[3-4]")
        return arguments[-1].replace(",m[3-4]", "\nm3\nm4\n")

    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", call)
    monkeypatch.setattr(supervise, "_REPEATED_INTERVAL_S", 0.0)
    supervise._wait_for_old_kills(Job(resolve.load(run.config), run, Supervisor(run.logs)), backend)
    assert len(asked) == looks


def test_requeued_job_waits_a_limited_time(monkeypatch: pytest.MonkeyPatch, run: RunDirectory) -> None:
    backend = replace(asked_by(monkeypatch, run, JobState("7", "RUNNING", restarts=1)).backend, nodes=[Node("n1", "")])
    monkeypatch.setattr("arpo_megatron.cluster.slurm.nodes_with_pending_kills", lambda: {"n1"})
    monkeypatch.setattr(supervise, "_REPEATED_INTERVAL_S", 0.0)
    monkeypatch.setattr(supervise, "_REPEATED_S", 0.1)
    supervise._wait_for_old_kills(Job(resolve.load(run.config), run, Supervisor(run.logs)), backend)


@pytest.mark.parametrize("end", [None, UserError("a check failed"), StoppedError("saved"), Interrupted()])
def test_scratch_directories_and_images_of_ended_jobs_are_removed(
    end: BaseException | None, monkeypatch: pytest.MonkeyPatch, run: RunDirectory
) -> None:
    """Those of running jobs and of unknown jobs stay. A job that must leave soon leaves its image to the next one."""
    steps: list[list[str]] = []
    numbers = (NOBODYS, 8, 9, 10)
    found = [place for n in numbers for place in (f"/tmp/arpo-{n}", f"pyxis_arpo-{n}")]
    listed = subprocess.CompletedProcess([], 0, "\n".join(found), "")
    monkeypatch.setattr(
        "arpo_megatron.cluster.backend.SlurmBackend._on_nodes",
        lambda self, name, arguments, *_: steps.append(arguments) or listed,
    )
    states = {"8": JobState("8", "CANCELLED"), "9": JobState("9", "RUNNING")}
    monkeypatch.setattr(
        "arpo_megatron.cluster.slurm.job_states", lambda jobs: {n: states[n] for n in jobs if n in states}
    )
    backend = asked_by(monkeypatch, run, None).backend
    backend = replace(backend, job_id=NOBODYS, profile=replace(backend.profile, container="/i.sqsh"))
    with suppress(UserError, StoppedError, Interrupted), backend.prepared():
        own = f"pyxis_arpo-{NOBODYS}"
        assert steps.pop()[3:] == ["arpo", own, "/tmp/arpo-8", "pyxis_arpo-8"], "its own is of an earlier start"
        if end is not None:
            raise end
    *more, cleanup = steps[1:]
    assert [each[3:] for each in more] == ([] if isinstance(end, StoppedError | Interrupted) else [["arpo", own]])
    assert cleanup == ["rm", "-rf", f"/tmp/arpo-{NOBODYS}"]


def test_error_before_the_job_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    run.config.write_text("train: {stepz: 1}")
    assert ended(monkeypatch, run, None) == 2
    assert "unknown config key train.stepz" in capsys.readouterr().err
    monkeypatch.delenv("SLURM_JOB_ID")
    assert ended(monkeypatch, run, None) == 2
    assert "this is not a Slurm job" in capsys.readouterr().err
