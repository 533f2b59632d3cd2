"""`restarts` of a profile: a failed job starts again without the guilty node, while it gains checkpoints."""

import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from arpo_megatron.cluster import restarts, supervise
from arpo_megatron.cluster.backend import SlurmBackend
from arpo_megatron.cluster.profile import save_profile
from arpo_megatron.cluster.restarts import Restarts, after_failure, guilty_node
from arpo_megatron.cluster.slurm import JobState, Node
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import StoppedError, UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.plan.node_layout import NodeLayout
from tests.cluster.onebox import Onebox
from tests.cluster.stand_in import profile

RANK_3 = "train ended with exit code 1; log: train.log\n  | ---- rank 3 failed:\n  | RuntimeError: CUDA error"


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmBackend:
    """A job on n1 and n2, with two ranks each, in a partition that has one more node."""
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", lambda *_: "n1 alloc\nn2 alloc\nn3 idle\nn4 down*\n")
    nodes = [Node("n1", "127.0.0.11"), Node("n2", "127.0.0.12")]
    (tmp_path / "submissions").mkdir()
    return SlurmBackend(profile(restarts=2), NodeLayout(2, 8, 2, 2, 1, 1, True), nodes, RunDirectory(tmp_path), "7")


@pytest.mark.parametrize(
    ("error", "node"),
    [
        (RANK_3, "n2"),
        ("no trainer rank has made progress for 9 s; stacks: x; rank 0, 1 wrote no stacks", "n1"),
        ("no trainer rank has made progress for 9 s; rank 0, 2 wrote no stacks", None),
        ("train was killed\n  | srun: error: n2: task 3: Killed\n  | srun: error: n1: task 0: Terminated", "n2"),
        ("train ended\n  | srun: error: n2: task 3: Killed\n  | ---- rank 0 failed:\n  | RuntimeError: peer", "n2"),
        ("engine-0 ended with exit code 1", None),
    ],
)
def test_guilty_node_is_that_of_the_rank_that_failed_first(error: str, node: str | None, backend: SlurmBackend) -> None:
    assert guilty_node(error, backend) == node


def test_job_restarts_while_it_gains_checkpoints(backend: SlurmBackend) -> None:
    run = backend.run

    def fail(error: str = RANK_3) -> str:
        after, text = after_failure(error, run, backend)
        if after is not None:
            after.write(run)
        return text

    assert fail(RANK_3.replace("RuntimeError: CUDA error", "arpo: the disk is full")).endswith("no restart")
    assert fail() == "restart 1 of 2, without n2"
    assert fail() == "no checkpoint was gained since the last restart: no restart"
    (run.checkpoints / "step_1").mkdir(parents=True)
    assert (
        fail(RANK_3.replace("rank 3", "rank 0")) == "restart 2 of 2, on n1 again: the partition has too few other nodes"
    )
    (run.checkpoints / "step_2").mkdir()
    assert fail() == "it has restarted 2 times (restarts: 2)"
    assert Restarts.read(run, "7").excluded == ("n2",)
    assert Restarts.read(run, "8") == Restarts("8"), "another job of the run counts from 0"


def test_lost_nodes_are_left_out_without_a_limit_while_checkpoints_are_gained(backend: SlurmBackend) -> None:
    run, unlimited = backend.run, replace(backend, profile=profile())
    for number, (lost, text) in enumerate([("n2", "restart 1, without n2"), ("n1", "restart 2, on n1 again: the ")], 1):
        (run.checkpoints / f"step_{number}").mkdir(parents=True)
        after, said = after_failure("", run, unlimited, [lost])
        assert after is not None and said.startswith(text)
        after.write(run)
    assert Restarts.read(run, "7").excluded == ("n2",)
    assert after_failure("", run, unlimited, ["n1"])[1].startswith("no checkpoint was gained since the last restart")
    (run.checkpoints / "step_3").mkdir()
    assert after_failure("", run, backend, ["n1"]) == (None, "it has restarted 2 times (restarts: 2)")


@pytest.mark.parametrize(
    ("starts_before", "elapsed", "gain", "again"),
    [
        (1, "03:54:30", "", False),
        (1, "03:54:30", "sft_checkpoints/step_9", True),
        (1, "03:54:30", "checkpoints/step_1", True),
        (1, "03:54:30", "step_journal.msgpack", True),
        (1, "03:40:00", "", True),  # a preemption
        (0, "03:54:30", "", True),  # the first start fills caches
    ],
)
def test_job_whose_start_outlasts_its_time_is_not_requeued_forever(
    starts_before: int,
    elapsed: str,
    gain: str,
    again: bool,
    backend: SlurmBackend,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`time` is 4 h, and Slurm's signal comes 300 to 360 s before its end."""

    def start(*_: object) -> None:
        (backend.run.path / gain).mkdir(parents=True, exist_ok=True)
        raise StoppedError

    save_config(resolve.resolve("quickstart", overrides=["platform=cpu"]), backend.run.config)
    save_profile(profile(gpus_per_node=0), backend.run.cluster)
    state = JobState("7", "RUNNING", restarts=starts_before, elapsed=elapsed)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.job_state", lambda _: state)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.allocated_nodes", lambda _: backend.nodes)
    monkeypatch.setattr(supervise, "_run", start)
    monkeypatch.setattr(supervise, "interrupt_on_signals", lambda: None)
    monkeypatch.setattr(supervise, "_END_S", 0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert supervise.supervise(backend.run.path, []) == supervise.UNFINISHED
    output = capsys.readouterr().err
    assert ("arpo: requeueing the job" in output) is again
    assert ("no step was gained since the last requeue: set a longer `time` or a shorter" in output) is not again


def test_restarts_need_requeues() -> None:
    with pytest.raises(UserError, match="restarts: a job can restart only with requeue: true"):
        profile(restarts=1, requeue=False)


@pytest.mark.slurm_campaign
@pytest.mark.timeout(1800)
def test_killed_and_hanging_ranks_restart_the_job_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    box = Onebox.start(tmp_path_factory.mktemp("runs"), NODES="3")
    try:
        job = box.submit_run(
            "again",
            # Above the 60 s that a step which has ended may wait for the reports of its nodes.
            *("sft.steps=0", "train.steps=3", "train.tasks_per_step=2", "parallel.collective_timeout_s=120"),
            profile=box.profile("again", restarts=3),
        )
        for number, (node, end) in enumerate([("n2", signal.SIGKILL), ("n1", signal.SIGSTOP)], 1):
            job.wait_for("a checkpoint", lambda step=number: (job.run / "checkpoints" / f"step_{step}").is_dir())
            rank = next(r for r in _ranks(job.processes("arpo_megatron.cluster.rank")) if r[0] == node)
            rank[1].send_signal(end)
            job.wait_for("restart", lambda n=number: f"restart {n} of 3" in job.log())
        assert job.end() == "COMPLETED", str(job)
        assert "restart 1 of 3, without n2" in job.log()
        assert "wrote no stacks" in job.log()
        assert job.shown("ExcNodeList") == "n2"
        assert restarts.Restarts.read(RunDirectory(job.run), job.id).count == 2
        assert [row["step"] for row in job.rows()] == [1, 2, 3]
    finally:
        box.stop()


def _ranks(processes: list[psutil.Process]) -> list[tuple[str, psutil.Process]]:
    return [(each.environ()["SLURMD_NODENAME"], each) for each in processes]
