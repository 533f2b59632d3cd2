"""Calls of Slurm's commands, except sbatch, which nemo-run calls."""

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from arpo_megatron.errors import UserError

TIMEOUT_S = 30.0
LIVE = frozenset({"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "SIGNALING"})
"""States of a job that may still run."""


@dataclass(frozen=True, slots=True)
class Node:
    """Name and address of a node in an allocation."""

    name: str
    address: str
    """Address at which the other nodes reach it."""


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as Slurm's controller or its accounting describes it."""

    id: str
    state: str
    name: str = ""
    reason: str = ""
    nodes: str = ""
    elapsed: str = ""
    restarts: int = 0
    exit_code: str = ""
    end: float | None = None
    """Unix time in seconds at which the time limit, or the grace period after a preemption, ends."""

    @property
    def live(self) -> bool:
        """Whether the job waits, runs or is ending."""
        return self.state in LIVE


_UNKNOWN = "Invalid job id"
_OWED = re.compile(r"^\s*\d+: REQUEST_(?:SIGNAL|TERMINATE)_TASKS\s+(\S+)", re.MULTILINE)
"""A line of sdiag's "Pending RPCs", with the nodes that have not answered it."""


def call(*command: str, check: bool = True, ignore: str | None = None) -> str:
    """Return the standard output of a Slurm command.

    Raises:
        UserError: the command is not installed, does not answer, or fails. A failure is ignored if `check` is False or
            its error contains `ignore`.
    """
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]} is not on the PATH: run this on a login node of the Slurm cluster")
    try:
        # SIGPIPE stays ignored, as it is in Python: munge's library does not handle it, and a busy munged that closes
        # the connection would kill the command. Slurm tries again after the write error.
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, restore_signals=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{command[0]} did not answer for {TIMEOUT_S:g} s: Slurm's controller is down or busy"
        ) from None
    if done.returncode and check and not (ignore and ignore in done.stderr):
        raise UserError(f"{' '.join(command[:3])}: {' '.join(done.stderr.split()) or 'failed'}")
    return done.stdout


def allocated_nodes(node_list: str) -> list[Node]:
    """Return the nodes of a Slurm host list, in order."""
    names = call("scontrol", "show", "hostnames", node_list).split()
    return [Node(name, _field(call("scontrol", "-o", "show", "node", name), "NodeAddr") or name) for name in names]


def nodes_with_pending_kills() -> set[str]:
    """Return the names of nodes that have not yet confirmed a signal to one of their steps.

    The controller repeats such a signal once a minute. Its list may be half a minute old.
    """
    owed = _OWED.findall(call("sdiag"))
    return set(call("scontrol", "show", "hostnames", ",".join(owed)).split()) if owed else set()


def job_state(job_id: str) -> JobState | None:
    """Return a job from the controller, else from the accounting, else None."""
    shown = call("scontrol", "-o", "show", "job", job_id, ignore=_UNKNOWN)
    if state := _field(shown, "JobState"):
        return JobState(
            job_id,
            state,
            _field(shown, "JobName"),
            _field(shown, "Reason"),
            _field(shown, "NodeList").replace("(null)", ""),
            _field(shown, "RunTime"),
            int(_field(shown, "Restarts") or 0),
            _field(shown, "ExitCode"),
            _time(_field(shown, "EndTime")),
        )
    line = call("sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State,NodeList,Elapsed,ExitCode,JobName", check=False)
    if line.strip():
        state, nodes, elapsed, code, name = line.splitlines()[-1].split("|", 4)
        return JobState(job_id, state.split()[0], name, "", nodes, elapsed, 0, code)
    return None


def job_states(job_ids: Sequence[str]) -> dict[str, JobState]:
    """Return name and state of several jobs by id, from the same sources as `job_state`, with one call to each."""
    found: dict[str, JobState] = {}
    controller = ("squeue", "-h", "-t", "all", "-o", "%i|%T|%j", "-j")
    accounting = ("sacct", "-X", "-n", "-P", "-o", "JobID,State,JobName", "-j")
    for command in (controller, accounting):
        if not (missing := [job for job in job_ids if job not in found]):
            break
        shown = call(*command, ",".join(missing), check=command is controller, ignore=_UNKNOWN)
        for job, state, name in (line.split("|", 2) for line in shown.splitlines() if line.strip()):
            found[job.strip()] = JobState(job.strip(), state.split()[0], name.strip())
    return found


def seconds(limit: str) -> int:
    """Convert a time limit of Slurm: [days-]hours:minutes:seconds, minutes:seconds, minutes or days-hours."""
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, secs = (*parts, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + secs
    if len(parts) == 1:
        return parts[0] * 60
    if len(parts) == 2:
        return parts[0] * 60 + parts[1]
    return (parts[0] * 60 + parts[1]) * 60 + parts[2]


def _time(text: str) -> float | None:
    """Parse a time that Slurm printed in this machine's time zone. Return None for "Unknown"."""
    with suppress(ValueError):
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return None


def _field(text: str, name: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S*)", text)
    return found[1] if found else ""
