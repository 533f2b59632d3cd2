"""The nodes of a Slurm allocation as the site of a job: every role is a step of it, started with srun.

All steps overlap (`--overlap`) and see all GPUs of their node; which of them a role uses is said by the role plan, as
on one machine: `--exact` would divide the CPUs and could not let an engine share the trainer's GPUs.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from arpo_megatron.cluster.plan import RolePlan
from arpo_megatron.cluster.profile import ClusterProfile
from arpo_megatron.cluster.rank import RANKS_PER_NODE
from arpo_megatron.cluster.slurm import Node
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.machine import Placement
from arpo_megatron.processes import GRACE_S
from arpo_megatron.rollout.sglang_main import LAUNCHER_PID_VARIABLE
from arpo_megatron.run_directory import RunDirectory
from arpo_megatron.supervisor import Program

TASK = 'trap \'\' USR1; mkdir -p "${TMPDIR:-/tmp}"; exec "$@"'
"""The shell line in which a task starts. Slurm's warning is for the supervisor alone, so roles do not hear it."""
_TIDY_S = 20.0
_ALIVE_S = 20.0
KEPT_VARIABLES = ("SLURM_JOB_ID", "SLURM_CONF")
"""Of Slurm's own: the others describe the supervisor's step, and srun would take them for wishes."""


@dataclass(slots=True)
class SlurmSite:
    """See `site.Site`.

    Attributes:
        profile: of the cluster.
        plan: which role runs where.
        nodes: of the allocation.
        free_ports: of each node by its name, found there by the doctor.
        run: run directory; all nodes see it.
        job_id: of the allocation.
    """

    profile: ClusterProfile
    plan: RolePlan
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
        return self.plan.placement(engine)

    def place(self, role: str, program: Program) -> Program:
        """The program as a step on its node."""
        return replace(
            program,
            command=self.step(program.name, [self._node(role)], 1, self.python(program.command)),
            # Slurm ends the step with the supervisor; no process of this machine is to be watched over there.
            environment={**_without_slurm(program.environment), LAUNCHER_PID_VARIABLE: "0"},
            grace_s=GRACE_S,
            restart_grace_s=GRACE_S,
            bound=True,
        )

    def ranks(self, module: str, arguments: Sequence[str], config: JobConfig) -> tuple[list[str], dict[str, str]]:
        """One task a rank (`rank.py`), spread as planned."""
        nodes, each = self.nodes[: self.plan.trainer_nodes], self.plan.ranks_per_node
        command = self.python([sys.executable, "-m", "arpo_megatron.cluster.rank", module, *arguments])
        (port,) = self.ports("trainer", 1)
        variables = {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": str(port), RANKS_PER_NODE: str(each)}
        return self.step(module.rpartition(".")[2], nodes, each, command), variables

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A short path, made on each node by the task itself; what a kill leaves, the node's housekeeping clears."""
        path = Path(f"/tmp/arpo-{self.job_id}")  # noqa: S108  (IPC sockets want a short path that belongs to the node)
        try:
            yield path
        finally:
            words = self.step("tidy", self.nodes, 1, ["rm", "-rf", str(path)])
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIDY_S, check=False)

    def python(self, command: Sequence[str]) -> list[str]:
        """A command that begins with this Python, as the roles' own runs it."""
        if command[0] != sys.executable:
            raise ValueError(f"a role is a Python program, not {command[0]}")
        python = sys.executable if self.profile.container is None else self.profile.container_python
        return [python, *command[1:]]

    def step(self, name: str, nodes: Sequence[Node], tasks_per_node: int, command: Sequence[str]) -> list[str]:
        """The srun of a role: `tasks_per_node` tasks on each of these nodes."""
        return [
            *("srun", "--overlap", "--kill-on-bad-exit=1", "--cpu-bind=none", f"--job-name={name}"),
            f"--nodes={len(nodes)}",
            f"--ntasks={len(nodes) * tasks_per_node}",
            f"--ntasks-per-node={tasks_per_node}",
            f"--nodelist={','.join(node.name for node in nodes)}",
            *gpu_words(self.profile, self.plan),
            *self._container(),
            *("bash", "-c", TASK, "arpo", *command),
        ]

    def lost_nodes(self) -> list[str]:
        """Names of the nodes that start no step any more. Takes seconds; only a failure asks."""
        words = [(node.name, self.step("alive", [node], 1, ["true"])) for node in self.nodes]
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
        mounts = [*self.profile.mounts, f"{self.run.path}:{self.run.path}"]  # the code is in there too
        return [
            f"--container-image={self.profile.container}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={Path.cwd()}",
        ]

    def _node(self, role: str) -> Node:
        return self.nodes[self.plan.engines[int(role[len("engine-") :])][0] if role.startswith("engine-") else 0]


def gpu_words(profile: ClusterProfile, plan: RolePlan) -> list[str]:
    """How a step, or an allocation, asks for all GPUs of its nodes, if it wants any."""
    if not plan.gpus or profile.gpu_request == "none":
        return []
    amount = f"{profile.gpu_type}:{plan.gpus}" if profile.gpu_type else str(plan.gpus)
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
