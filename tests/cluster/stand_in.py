"""A stand-in for Slurm, for tests that need no real one or a behaviour that a real one cannot be made to show."""

from dataclasses import replace
from pathlib import Path

import pytest

from arpo_megatron.cluster.code_snapshot import Code
from arpo_megatron.cluster.profile import ClusterProfile, check_profile, save_profile
from arpo_megatron.cluster.submission import Submission
from arpo_megatron.cluster.submit import prepare_submission, submit_jobs
from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import choose_run, resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.utils.atomic import write_json

PLAIN = {"account": "research", "runs": "/shared/runs", "gpus_per_node": 8}


def profile(**values: object) -> ClusterProfile:
    return check_profile({**PLAIN, **values}, "here.yaml")


class Queue:
    """Slurm with a limit on submitted jobs: it accepts `takes` jobs. (A real one needs accounting for such a limit.)"""

    def __init__(self, takes: int, *, cancels: bool = True) -> None:
        self.takes, self.cancels = takes, cancels
        self.jobs: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.sent: list[Submission] = []
        self.name = ""
        """Name that all jobs have instead of their own."""
        self.asked: list[str] = []
        self.updates: list[tuple[str, ...]] = []

    def send(self, submission: Submission, code: Code) -> str:
        if len(self.jobs) == self.takes:
            raise UserError("sbatch refused the job: QOSMaxSubmitJobPerUserLimit")
        self.jobs[job := str(4711 + len(self.jobs))] = "PENDING"
        self.names[job] = submission.job_name
        self.sent.append(submission)
        return job

    def call(self, *arguments: str, check: bool = True, ignore: str | None = None) -> str:
        self.asked.append(arguments[0])
        if arguments[0] == "squeue":
            known = [job for job in arguments[-1].split(",") if job in self.jobs]
            return "".join(f"{job}|{self.jobs[job]}|{self.name or self.names[job]}\n" for job in known)
        if arguments[:2] == ("scontrol", "update"):
            self.updates.append(arguments[2:])
        if arguments[0] == "scancel":
            if not self.cancels:
                raise UserError("scancel did not answer for 30 s")
            self.jobs[arguments[1]] = "CANCELLED"
        return f"JobState={self.jobs[arguments[-1]]} " if arguments[:4] == ("scontrol", "-o", "show", "job") else ""


def in_chain(queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, resume: bool = False) -> RunDirectory:
    """Submit a chain of three jobs, of which the queue refuses one; the error is in `RUN.error`."""
    monkeypatch.setattr("arpo_megatron.cluster.submit.submit_one", queue.send)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", queue.call)
    job = resolve.resolve("quickstart", overrides=["platform=cpu"])
    submission = prepare_submission(job, profile(runs=str(tmp_path)), nodes=1, chain=3, resume=resume)
    with pytest.raises(UserError, match="QOSMaxSubmitJobPerUserLimit") as refused:
        submit_jobs(submission)
    submission.run.path.with_suffix(".error").write_text(str(refused.value))
    return submission.run


def submitted(tmp_path: Path, config: JobConfig, cluster: ClusterProfile, nodes: int | None = None) -> RunDirectory:
    """Return a run like one that `arpo submit` wrote."""
    submission = prepare_submission(replace(config, run_dir=tmp_path / "run"), cluster, nodes=nodes)
    run = choose_run.fresh(submission.config)
    save_config(submission.config, run.config)
    run.submissions.mkdir()
    save_profile(cluster, run.cluster)
    write_json(
        run.submissions / "1.json",
        {"jobs": ["1"], "job_name": "arpo-run", "layout": {"nodes": submission.layout.nodes}, "auto": submission.auto},
    )
    return run
