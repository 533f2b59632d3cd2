"""The few Slurm commands that are used besides nemo-run's sbatch."""

import re
import shutil
import subprocess
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
    """What Slurm knows of a job."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    elapsed: str = ""
    restarts: int = 0
    exit_code: str = ""

    @property
    def live(self) -> bool:
        """Whether it may still run."""
        return self.state in LIVE


def call(*words: str, check: bool = True) -> str:
    """Standard output of a Slurm command.

    Raises:
        UserError: it is not installed, does not answer, or (`check`) failed; the message is its own.
    """
    if shutil.which(words[0]) is None:
        raise UserError(f"{words[0]} is not on the PATH: this is not a login node of a Slurm cluster")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{words[0]} did not answer for {TIMEOUT_S:g} s: Slurm's controller is down or busy") from None
    if done.returncode and check:
        raise UserError(f"{' '.join(words[:3])}: {' '.join(done.stderr.split()) or 'failed'}")
    return done.stdout


def allocated_nodes(node_list: str) -> list[Node]:
    """The nodes of a Slurm host list, in order."""
    names = call("scontrol", "show", "hostnames", node_list).split()
    return [Node(name, _field(call("scontrol", "-o", "show", "node", name), "NodeAddr") or name) for name in names]


def job_state(job_id: str) -> JobState | None:
    """What the controller knows of a job, or the accounting where it has forgotten; None: neither."""
    shown = call("scontrol", "-o", "show", "job", job_id, check=False)
    if state := _field(shown, "JobState"):
        return JobState(
            job_id,
            state,
            _field(shown, "Reason"),
            _field(shown, "NodeList").replace("(null)", ""),
            _field(shown, "RunTime"),
            int(_field(shown, "Restarts") or 0),
            _field(shown, "ExitCode"),
        )
    line = call("sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State,NodeList,Elapsed,ExitCode", check=False)
    if line.strip():
        state, nodes, elapsed, code = line.splitlines()[-1].split("|")
        return JobState(job_id, state.split()[0], "", nodes, elapsed, 0, code)
    return None


def _field(text: str, name: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S*)", text)
    return found[1] if found else ""
