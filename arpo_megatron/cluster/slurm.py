"""The few Slurm commands that are used besides nemo-run's sbatch."""

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
    """A node of an allocation: its name for Slurm, and an address under which the other nodes reach it."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class JobState:
    """What Slurm knows of a job. `end` is when its time is up, or its grace after a preemption (Unix time, seconds)."""

    id: str
    state: str
    name: str = ""
    reason: str = ""
    nodes: str = ""
    elapsed: str = ""
    restarts: int = 0
    exit_code: str = ""
    end: float | None = None

    @property
    def live(self) -> bool:
        """Whether it may still run."""
        return self.state in LIVE


_UNKNOWN = "Invalid job id"
_OWED = re.compile(r"^\s*\d+: REQUEST_(?:SIGNAL|TERMINATE)_TASKS\s+(\S+)", re.MULTILINE)
"""A line of sdiag's "Pending RPCs", with the nodes that wait for it."""


def call(*words: str, check: bool = True, but: str | None = None) -> str:
    """Standard output of a Slurm command.

    Raises:
        UserError: it is not installed, does not answer, or (`check`) failed, unless it says `but`; the message is its
            own.
    """
    if shutil.which(words[0]) is None:
        raise UserError(f"{words[0]} is not on the PATH: this is not a login node of a Slurm cluster")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{words[0]} did not answer for {TIMEOUT_S:g} s: Slurm's controller is down or busy") from None
    if done.returncode and check and not (but and but in done.stderr):
        raise UserError(f"{' '.join(words[:3])}: {' '.join(done.stderr.split()) or 'failed'}")
    return done.stdout


def allocated_nodes(node_list: str) -> list[Node]:
    """The nodes of a Slurm host list, in order."""
    names = call("scontrol", "show", "hostnames", node_list).split()
    return [Node(name, _field(call("scontrol", "-o", "show", "node", name), "NodeAddr") or name) for name in names]


def nodes_owed_a_kill() -> set[str]:
    """Names of the nodes that have not answered yet when a step on them was to be signalled.

    The controller repeats such a signal once a minute. What it says of them may be half a minute old.
    """
    owed = _OWED.findall(call("sdiag"))
    return set(call("scontrol", "show", "hostnames", ",".join(owed)).split()) if owed else set()


def job_state(job_id: str) -> JobState | None:
    """What the controller knows of a job, or the accounting where it has forgotten; None: neither."""
    shown = call("scontrol", "-o", "show", "job", job_id, but=_UNKNOWN)
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
    """Name and state of many jobs by id, as `job_state` finds them, with one question to each of the two."""
    found: dict[str, JobState] = {}
    controller = ("squeue", "-h", "-t", "all", "-o", "%i|%T|%j", "-j")
    accounting = ("sacct", "-X", "-n", "-P", "-o", "JobID,State,JobName", "-j")
    for words in (controller, accounting):
        if not (missing := [job for job in job_ids if job not in found]):
            break
        said = call(*words, ",".join(missing), check=words is controller, but=_UNKNOWN)
        for job, state, name in (line.split("|", 2) for line in said.splitlines() if line.strip()):
            found[job.strip()] = JobState(job.strip(), state.split()[0], name.strip())
    return found


def seconds(limit: str) -> int:
    """Of a time limit as Slurm writes it: [days-]hours:minutes:seconds, minutes:seconds, minutes, days-hours."""
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
    """As Slurm writes one, in this machine's zone; None: Unknown."""
    with suppress(ValueError):
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return None


def _field(text: str, name: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S*)", text)
    return found[1] if found else ""
