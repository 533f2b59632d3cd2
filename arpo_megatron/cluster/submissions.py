"""What was submitted of a run, and which of its jobs are still in the queue."""

import json
from typing import Any

from arpo_megatron.cluster import slurm
from arpo_megatron.run_directory import RunDirectory


def submissions_of(run: RunDirectory) -> list[dict[str, Any]]:
    """What `submit` has recorded, oldest first."""
    files = sorted(run.submissions.glob("[0-9]*.json"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def job_states(run: RunDirectory) -> list[slurm.JobState]:
    """Of its jobs, in the order of their submission; those that Slurm has forgotten are left out."""
    jobs = [job for submission in submissions_of(run) for job in submission["jobs"]]
    return [state for job in jobs if (state := slurm.job_state(job)) is not None]


def live_jobs(run: RunDirectory) -> list[str]:
    """Ids of those that wait or run."""
    return [state.id for state in job_states(run) if state.live]


def waiting_jobs(run: RunDirectory) -> list[str]:
    """Ids of those that wait: the links of a chain that have not begun."""
    return [state.id for state in job_states(run) if state.state == "PENDING"]
