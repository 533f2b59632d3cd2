"""Records of a run's submissions, and its jobs in Slurm's queue."""

import json
import shlex
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from arpo_megatron.cluster import slurm
from arpo_megatron.config import JobConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.utils.atomic import read_json
from arpo_megatron.utils.json_lines import json_lines

_COMMANDS = "commands.jsonl"
_MAY_BE_AUTO = ("engine.placement",)
"""Keys whose value `auto` depends on the number of nodes. The config of a submitted run has the values for its newest
submission, because its processes read it."""


def submissions_of(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the records of `submit_jobs`, oldest first."""
    files = sorted(run.submissions.glob("[0-9]*.json"), key=lambda path: int(path.stem))
    return [read_json(path, "delete it, after scancel of its jobs") for path in files]


def no_longer_auto(before: JobConfig, after: JobConfig) -> tuple[str, ...]:
    """Return the keys that were `auto` before the submission replaced their values."""
    values = [(key, attrgetter(key)) for key in _MAY_BE_AUTO]
    return tuple(key for key, value in values if value(before) == "auto" != value(after))


def config_before_auto(run: RunDirectory) -> JobConfig:
    """Return the config of a submitted run with `auto` again where its newest submission replaced it."""
    auto = submissions_of(run)[-1].get("auto", ())
    return resolve.with_overrides(resolve.load(run.config), [f"{key}=auto" for key in auto])


def job_states(run: RunDirectory) -> list[slurm.JobState]:
    """Return the states of a run's jobs in the order of submission, without those that Slurm has forgotten."""
    return job_states_of([run])[0]


def job_states_of(runs: Sequence[RunDirectory]) -> list[list[slurm.JobState]]:
    """Return `job_states` of each run, with one query for all of them.

    Slurm reuses job ids after a loss of its state, or when they run out. A job with another name is not the run's.
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
    """Return the ids of the run's jobs that wait or run."""
    return [state.id for state in job_states(run) if state.live]


def record_command(run: RunDirectory, job: str, job_name: str, words: Sequence[str]) -> None:
    """Record a job that runs `arpo WORDS...` for the run."""
    with (run.submissions / _COMMANDS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"job": job, "job_name": job_name, "command": list(words)}) + "\n")


def command_jobs(run: RunDirectory) -> list[tuple[str, slurm.JobState]]:
    """Return each command that was submitted for the run, with the state of its job unless Slurm has forgotten it."""
    file = run.submissions / _COMMANDS
    rows = [row for _, row in json_lines(file.read_bytes()) if row] if file.exists() else []
    states = slurm.job_states([row["job"] for row in rows]) if rows else {}
    found = [(shlex.join(["arpo", *row["command"]]), states.get(row["job"]), row["job_name"]) for row in rows]
    return [(command, state) for command, state, name in found if state is not None and state.name == name]


def waiting_jobs(run: RunDirectory) -> list[str]:
    """Return the ids of the run's jobs that wait: the links of its chain that have not started."""
    return [state.id for state in job_states(run) if state.state == "PENDING"]
