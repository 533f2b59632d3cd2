"""A job that is ready to be submitted."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arpo_megatron.cluster.code_snapshot import Code
from arpo_megatron.cluster.mounts import on_host
from arpo_megatron.cluster.profile import ClusterProfile
from arpo_megatron.config import JobConfig
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.models.known import load_spec
from arpo_megatron.plan import JobEstimate
from arpo_megatron.plan.memory import checkpoint_bytes
from arpo_megatron.plan.node_layout import NodeLayout


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that is ready to be submitted."""

    config: JobConfig
    """Config with the run directory, engine placement and weight transport for this number of nodes."""
    profile: ClusterProfile
    layout: NodeLayout
    run: RunDirectory
    chain: int = 1
    """Number of jobs to queue; each continues the one before."""
    forecast: JobEstimate | None = None
    """Expected memory and time; None without `ClusterProfile.hardware`."""
    resume: bool = False
    """Whether the run exists already."""
    auto: tuple[str, ...] = ()
    """Keys that were `auto` before the number of nodes was known."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the job's first process (`cluster/__main__.py`)."""
    command: str = ""
    """Command that the job runs instead of the training (`commands.py`)."""
    after: tuple[str, ...] = ()
    """Jobs that must have ended before this one starts."""

    @property
    def job_name(self) -> str:
        """Name for Slurm. All jobs that train a run have one, so `--dependency=singleton` runs one at a time."""
        return f"arpo-{self.run.path.name}{f'-{self.command}' if self.command else ''}"

    @property
    def too_late(self) -> str:
        """Why Slurm's signal comes too late to save; empty if it does not, or without a forecast."""
        if self.forecast is None:
            return ""
        size = checkpoint_bytes(self.config, load_spec(on_host(self.config, self.profile).model))
        save_s = size / (1e9 * self.profile.filesystem_gb_s)
        needed_s = self.forecast.seconds + save_s
        if self.profile.signal_s >= needed_s:
            return ""
        return (
            f"signal_s={self.profile.signal_s} is shorter than a step of {self.forecast.seconds:.0f} s and a save of "
            f"{save_s:.0f} s (filesystem_gb_s): set signal_s to {math.ceil(needed_s / 60) * 60}"
        )

    @property
    def logs(self) -> Path:
        """Directory of the job's output."""
        return self.run.logs / self.command

    def record(self, jobs: Sequence[str], job_name: str, code: Code | None = None) -> dict[str, Any]:
        """Return the record of the submission of `jobs` with `code` (None: unknown), as `submissions_of` reads it."""
        return {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "jobs": list(jobs),
            "job_name": job_name,
            "commit": code.commit if code else "unknown",
            "tree": code.tree if code else None,
            "changed": code is not None and bool(code.diff),
            "layout": asdict(self.layout),
            "auto": list(self.auto),
        }
