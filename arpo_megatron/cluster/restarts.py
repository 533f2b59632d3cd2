"""Requeues of a Slurm job that failed (`restarts` in the profile) or whose time is up, and when they end.

A failure of the software or of a node requeues the job without the guilty nodes. Three conditions end this: the number
of restarts, a fault that the user must fix, and a job that got no further than its last failure, however early. A lost
node counts as a restart; it requeues the job also with `restarts: 0`, which sets no limit then.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from arpo_megatron.cluster import slurm
from arpo_megatron.cluster.backend import SlurmBackend
from arpo_megatron.cluster.profile import ClusterProfile
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.checkpoint_dirs import checkpoint_directories, step_of
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.hangs import WROTE_NONE
from arpo_megatron.utils.atomic import read_json, write_json

_RANKS = re.compile(rf"rank ([\d, ]+) (?:failed:|{WROTE_NONE})")
_SRUN = re.compile(r"srun: error: ([\w.-]+): tasks? ")
"""srun's report of a task that was killed; the first is the one that ended the step."""
_USER_ERROR = re.compile(r"rank \d+ failed:\n\s*\|?\s*arpo: ")
"""The report of a rank whose error the user must fix, such as a full disk."""
_EARLY_S = 60
"""Slurm may send its signal this many seconds before `signal_s`."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """The failures of a job so far; `restarts.json` keeps them over requeues."""

    job_id: str = ""
    count: int = 0
    """Restarts of this job."""
    progress: tuple[int, int] = (-2, -2)
    """Newest checkpoints of the cold start and of the training at the last failure (-1: none); -2: no failure yet."""
    excluded: tuple[str, ...] = field(default=())
    """Nodes on which it failed."""

    @classmethod
    def read(cls, run: RunDirectory, job_id: str) -> Self:
        """Return the record of the job; an earlier job of the run does not count."""
        found: dict[str, Any] = read_json(_file(run), "delete it") if _file(run).exists() else {}
        if found.get("job_id") != job_id:
            return cls(job_id)
        return cls(job_id, found["count"], tuple(found["progress"]), tuple(found["excluded"]))

    def write(self, run: RunDirectory) -> None:
        write_json(_file(run), asdict(self))


def after_failure(
    error: str, run: RunDirectory, backend: SlurmBackend, guilty: Sequence[str] = ()
) -> tuple[Restarts | None, str]:
    """Decide whether a failed job is requeued. Nothing is written.

    Args:
        error: message of the failure.
        run: the run.
        backend: profile and nodes of the job.
        guilty: names of the guilty nodes; empty: the message may name one.

    Returns:
        The record of the job after the restart, or None if it must not restart, and a phrase for the user.
    """
    before, limit = Restarts.read(run, backend.job_id), backend.profile.restarts
    progress = (_newest(run.sft_checkpoints), _newest(run.checkpoints))
    if _USER_ERROR.search(error):
        return None, "the error needs a change: no restart"
    if limit and before.count >= limit:
        return None, f"it has restarted {before.count} times (restarts: {limit})"
    if progress <= before.progress:
        return None, "no checkpoint was gained since the last restart: no restart"
    after = replace(before, count=before.count + 1, progress=progress)
    text = f"restart {after.count} of {limit}" if limit else f"restart {after.count}"
    node = guilty_node(error, backend)
    nodes = [each for each in guilty or ([node] if node else []) if each not in before.excluded]
    if not nodes:
        return after, text
    excluded, named = (*before.excluded, *nodes), ", ".join(nodes)
    if not _can_spare(excluded, backend):
        return after, f"{text}, on {named} again: the partition has too few other nodes"
    return replace(after, excluded=excluded), f"{text}, without {named}"


def saved_state(run: RunDirectory) -> tuple[int, int, int]:
    """Return what the next start continues from.

    Returns:
        The newest checkpoints of the cold start and of the training (-1: none), and the time of the step journal.
    """
    journal = run.step_journal.stat().st_mtime_ns if run.step_journal.exists() else 0
    return _newest(run.sft_checkpoints), _newest(run.checkpoints), journal


def start_cycles(before: tuple[int, int, int], run: RunDirectory, profile: ClusterProfile, job_id: str) -> bool:
    """Return whether a requeued job has used up its time without a gain, so that its next start would end like this.

    The first start may be slow, because it fills caches. A job that was preempted has not used up its time.

    Args:
        before: `saved_state` at the start of the job.
        run: the run.
        profile: profile of the job.
        job_id: the job.
    """
    limit_s = slurm.seconds(profile.time)  # 0: no limit
    with suppress(UserError):  # Slurm does not answer
        state = slurm.job_state(job_id)
        if limit_s and state is not None and state.restarts and saved_state(run) == before:
            return slurm.seconds(state.elapsed) >= limit_s - profile.signal_s - _EARLY_S
    return False


def guilty_node(error: str, backend: SlurmBackend) -> str | None:
    """Return the node of the rank that failed first, or of those that wrote no stacks; None if it is not known."""
    killed, found = _SRUN.search(error), _RANKS.search(error)
    if found and not (killed and killed.start() < found.start()):  # the peers of a killed rank fail after it
        indices = {int(rank) // backend.layout.ranks_per_node for rank in found[1].split(",")}
        return backend.nodes[indices.pop()].name if len(indices) == 1 else None
    names = {node.name for node in backend.nodes}
    return next((name for name in _SRUN.findall(error) if name in names), None)


def exclude_nodes(job_id: str, nodes: Sequence[str]) -> None:
    """Exclude nodes from a waiting job. Raises UserError if Slurm refuses."""
    if nodes:
        slurm.call("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}")


def _can_spare(excluded: Sequence[str], backend: SlurmBackend) -> bool:
    """Return whether the partition has enough usable nodes without these."""
    partition = backend.profile.partition
    where = [] if partition is None else [f"--partition={partition}"]
    try:
        shown = slurm.call("sinfo", "-h", "-N", "-o", "%N %t", *where)
    except UserError:
        return False
    rows = [line.split() for line in shown.splitlines() if line.strip()]
    usable = {name for name, state in rows if state.rstrip("*~#!%$@^-") in ("idle", "alloc", "mix", "comp", "resv")}
    return len(usable - {*excluded}) >= len(backend.nodes)


def _newest(root: Path) -> int:
    return max((step_of(path) or 0 for path in checkpoint_directories(root)), default=-1)


def _file(run: RunDirectory) -> Path:
    return run.submissions / "restarts.json"
