"""The nodes of a Slurm allocation as the backend of a job: every role is a step of it, started with srun.

All steps overlap (`--overlap`) and see all GPUs of their node; which of them a role uses is said by the node layout, as
on one machine: `--exact` would divide the CPUs and could not let an engine share the trainer's GPUs.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from arpo_megatron.cluster import slurm
from arpo_megatron.cluster.profile import ClusterProfile
from arpo_megatron.cluster.rank import RANKS_PER_NODE
from arpo_megatron.cluster.slurm import Node
from arpo_megatron.config import JobConfig
from arpo_megatron.engine.server.main import LAUNCHER_PID_VARIABLE
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.placement import Placement
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.plan.node_layout import NodeLayout
from arpo_megatron.utils.processes import GRACE_S
from arpo_megatron.utils.service_spec import ServiceSpec

TASK = "trap '' TERM USR1; exec \"$@\""
"""The shell line in which a task starts. Slurm's signals are for the supervisor alone, so roles do not hear them; it
ends a step through its srun, which makes a KILL of a TERM."""
SERVICE = "trap '' USR1; trap : TERM; \"$@\"; exit $?"
"""The same for a service: servers handle TERM, ignored or not, and their children have to end on it. So the shell stays
and hears it in their place. (proctrack/cgroup signals the children of slurmstepd alone, except with KILL.)"""
MAKE_SCRATCH = (
    'mkdir -p -m 700 "$1" || exit; '
    '[ -O "$1" ] && [ ! -L "$1" ] || { echo "$1 is there already, and it is not ours" >&2; exit 1; }; '
    'chmod 700 "$1" && find /tmp -maxdepth 1 -type d -user "$(id -u)" -name "arpo-[0-9]*"'
)
"""Also names this user's others, one a line. Job numbers can be guessed: what somebody else has made is not taken."""
_SHORT_S = 30.0
_ALIVE_S = 20.0
KEPT_VARIABLES = ("SLURM_JOB_ID", "SLURM_CONF")
"""Of Slurm's own: the others describe the supervisor's step, and srun would take them for wishes."""


class SilentNodeError(UserError):
    """A node has not done what it was asked. Slurm may have lost it, which it notices later: see `lost_nodes`."""


@dataclass(slots=True)
class SlurmBackend:
    """See `backend.Backend`.

    Attributes:
        profile: of the cluster.
        layout: which role runs where.
        nodes: of the allocation.
        free_ports: of each node by its name, found there by the doctor.
        run: run directory; all nodes see it.
        job_id: of the allocation.
    """

    profile: ClusterProfile
    layout: NodeLayout
    nodes: Sequence[Node]
    run: RunDirectory
    job_id: str
    free_ports: dict[str, list[int]] = field(default_factory=dict)

    def host(self, role: str) -> str:
        """The address of the role's node."""
        return self._node(role).address

    def ports(self, role: str, count: int) -> list[int]:
        """Of those that were free on its node. Raises UserError where they are used up."""
        free = self.free_ports[self._node(role).name]
        if len(free) < count:
            raise UserError(f"no TCP port is left for {role} on {self._node(role).name}: widen `ports` in the profile")
        taken, free[:] = free[:count], free[count:]
        return taken

    def placement(self, config: JobConfig, engine: int) -> Placement:
        """As planned."""
        return self.layout.placement(engine)

    def place(self, role: str, program: ServiceSpec) -> ServiceSpec:
        """The program as a step on its node."""
        return replace(
            program,
            command=self.step(program.name, [self._node(role)], 1, self.python(program.command), task=SERVICE),
            # Slurm ends the step with the supervisor; no process of this machine is to be watched over there.
            environment={**_without_slurm(program.environment), LAUNCHER_PID_VARIABLE: "0"},
            grace_s=GRACE_S,
            restart_grace_s=GRACE_S,
            bound=True,
        )

    def ranks(self, module: str, arguments: Sequence[str], config: JobConfig) -> tuple[list[str], dict[str, str]]:
        """One task a rank (`rank.py`), spread as planned."""
        nodes, each = self.nodes[: self.layout.trainer_nodes], self.layout.ranks_per_node
        command = self.python([sys.executable, "-m", "arpo_megatron.cluster.rank", module, *arguments])
        (port,) = self.ports("trainer", 1)
        variables = {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": str(port), RANKS_PER_NODE: str(each)}
        return self.step(module.rpartition(".")[2], nodes, each, command), variables

    @property
    def _scratch(self) -> Path:
        return _scratch_of(self.job_id)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A short path on each node; it is there inside `prepared`."""
        yield self._scratch

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Make the scratch directory on each node, before the first container that mounts it, and remove it at the end.

        A cancelled or killed job starts no step any more: what it leaves is removed by the next job on the node, where
        Slurm knows that it has ended. Raises SilentNodeError where it cannot be made.
        """
        made = self._on_nodes("scratch", ["bash", "-c", MAKE_SCRATCH, "arpo", str(self._scratch)])
        if made is None or made.returncode:
            why = "no answer" if made is None else " ".join(made.stderr.split())
            raise SilentNodeError(f"{self._scratch} cannot be made on the nodes: {why}")
        try:
            self._sweep(made.stdout.split())
            yield
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)  # on this node without a step
            self._on_nodes("tidy", ["rm", "-rf", str(self._scratch)])

    def _sweep(self, folders: Sequence[str]) -> None:
        """Remove scratch directories of jobs that have ended; one that Slurm does not know may be another cluster's."""
        jobs = {folder.rpartition("-")[2] for folder in folders} - {self.job_id}
        with suppress(UserError):  # Slurm is silent: the next job does it
            states = slurm.job_states(sorted(job for job in jobs if job.isdecimal()))
            if ended := [str(_scratch_of(job)) for job, state in states.items() if not state.live]:
                self._on_nodes("sweep", ["rm", "-rf", *ended])

    def _on_nodes(self, name: str, command: Sequence[str]) -> "subprocess.CompletedProcess[str] | None":
        """Run a short command on each node itself, outside containers; None: it took too long."""
        words = self.step(name, self.nodes, 1, command, inside=False)
        with suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SHORT_S, check=False
            )
        return None

    def python(self, command: Sequence[str]) -> list[str]:
        """A command that begins with this Python, as the roles' own runs it."""
        if command[0] != sys.executable:
            raise ValueError(f"a role is a Python program, not {command[0]}")
        python = sys.executable if self.profile.container is None else self.profile.container_python
        return [python, *command[1:]]

    def step(
        self,
        name: str,
        nodes: Sequence[Node],
        tasks_per_node: int,
        command: Sequence[str],
        *,
        inside: bool = True,
        task: str = TASK,
    ) -> list[str]:
        """The srun of a role: `tasks_per_node` tasks on each of these nodes, `inside` the container if there is one."""
        return [
            *("srun", "--overlap", "--kill-on-bad-exit=1", "--cpu-bind=none", f"--job-name={name}"),
            f"--nodes={len(nodes)}",
            f"--ntasks={len(nodes) * tasks_per_node}",
            f"--ntasks-per-node={tasks_per_node}",
            f"--nodelist={','.join(node.name for node in nodes)}",
            *gpu_options(self.profile, self.layout),
            *(self._container() if inside else ()),
            *("bash", "-c", task, "arpo", *command),
        ]

    def lost_nodes(self) -> list[str]:
        """Names of the nodes that start no step any more. Takes seconds; only a failure asks."""
        words = [(node.name, self.step("alive", [node], 1, ["true"], inside=False)) for node in self.nodes]
        tries = [
            (name, subprocess.Popen(word, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)) for name, word in words
        ]
        deadline = time.monotonic() + _ALIVE_S
        lost = []
        for name, process in tries:
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
                code = -1
            lost += [name] if code else []
        return lost

    def _container(self) -> list[str]:
        if self.profile.container is None:
            return []
        # The code is in the run directory too. Steps have a /tmp each; roles meet in sockets in the scratch directory.
        mounts = [*self.profile.mounts, *(f"{path}:{path}" for path in (self.run.path, self._scratch))]
        return [
            f"--container-image={self.profile.container}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={Path.cwd()}",
        ]

    def _node(self, role: str) -> Node:
        return self.nodes[self.layout.place(int(role[len("engine-") :]))[0] if role.startswith("engine-") else 0]


def _scratch_of(job_id: str) -> Path:
    return Path(f"/tmp/arpo-{job_id}")  # noqa: S108  (IPC sockets want a short path that belongs to the node)


def gpu_options(profile: ClusterProfile, layout: NodeLayout) -> list[str]:
    """How a step, or an allocation, asks for all GPUs of its nodes, if it wants any."""
    if not layout.gpus or profile.gpu_request == "none":
        return []
    amount = f"{profile.gpu_type}:{layout.gpus}" if profile.gpu_type else str(layout.gpus)
    return [f"--gres=gpu:{amount}" if profile.gpu_request == "gres" else f"--gpus-per-node={amount}"]


def drop_slurm_variables() -> None:
    """Take from this process what Slurm has told it about its own step; what it starts are other steps."""
    for name in set(os.environ) - set(_without_slurm(os.environ)):
        del os.environ[name]


def _without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT_VARIABLES or not name.startswith(("SLURM_", "SLURMD_", "SRUN_"))
    }
