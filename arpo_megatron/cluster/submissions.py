"""What was submitted of a run, and which of its jobs are still in the queue."""

import json
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from arpo_megatron.cluster import slurm
from arpo_megatron.config import JobConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory

_MAY_BE_AUTO = ("engine.placement", "sync.transport")
"""Keys that the number of nodes settles where they are `auto`. The config of a submitted run, which its roles read, has
what they are to do on the nodes of its newest submission."""


def submissions_of(run: RunDirectory) -> list[dict[str, Any]]:
    """What `submit` has recorded, oldest first."""
    files = sorted(run.submissions.glob("[0-9]*.json"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def no_longer_auto(said: JobConfig, settled: JobConfig) -> tuple[str, ...]:
    """Keys that were `auto` before a submission has settled them."""
    values = [(key, attrgetter(key)) for key in _MAY_BE_AUTO]
    return tuple(key for key, value in values if value(said) == "auto" != value(settled))


def config_said(run: RunDirectory) -> JobConfig:
    """The config of a submitted run as the user gave it: what its newest submission has settled is `auto` again."""
    auto = submissions_of(run)[-1].get("auto", ())
    return resolve.with_overrides(resolve.load(run.config), [f"{key}=auto" for key in auto])


def job_states(run: RunDirectory) -> list[slurm.JobState]:
    """Of its jobs, in the order of their submission; those that Slurm has forgotten are left out."""
    return job_states_of([run])[0]


def job_states_of(runs: Sequence[RunDirectory]) -> list[list[slurm.JobState]]:
    """`job_states` of each run, all asked at once.

    Slurm gives numbers anew after its state is lost or they run out: a job of another name is not the run's.
    """
    names = [
        {job: submission["job_name"] for submission in submissions_of(run) for job in submission["jobs"]}
        for run in runs
    ]
    states = slurm.job_states([job for each in names for job in each])
    return [
        [state for job, name in each.items() if (state := states.get(job)) is not None and state.name == name]
        for each in names
    ]


def live_jobs(run: RunDirectory) -> list[str]:
    """Ids of those that wait or run."""
    return [state.id for state in job_states(run) if state.live]


def waiting_jobs(run: RunDirectory) -> list[str]:
    """Ids of those that wait: the links of a chain that have not begun."""
    return [state.id for state in job_states(run) if state.state == "PENDING"]
