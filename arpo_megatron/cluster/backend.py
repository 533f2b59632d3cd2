"""Backend of a Slurm job: each process runs as a step of the allocation, started with srun.

All steps overlap (`--overlap`) and see all GPUs of their node. The node layout decides which GPUs a process uses, as on
one machine. `--exact` would divide the CPUs, and engines could not share the trainer's GPUs.
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
from arpo_megatron.engine.wire.endpoints import LAUNCHER_PID_VARIABLE
from arpo_megatron.errors import StoppedError, UserError
from arpo_megatron.hardware.placement import Placement
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.plan.node_layout import NodeLayout
from arpo_megatron.utils.processes import GRACE_S
from arpo_megatron.utils.service_spec import ServiceSpec
from arpo_megatron.utils.signals import Interrupted

TASK = "trap '' TERM USR1; exec \"$@\""
"""Shell line that starts a task. It ignores Slurm's signals, which are for the supervisor alone. The supervisor ends a
step through its srun, which follows a TERM with a KILL."""
SERVICE = "trap '' USR1; trap : TERM; \"$@\"; exit $?"
"""Shell line that starts a service. Servers must end on TERM, with their children, so TERM is not ignored; the shell
stays alive to receive it. (proctrack/cgroup signals only the children of slurmstepd, except with KILL.)"""
MAKE_SCRATCH = (
    'mkdir -p -m 700 "$1" || exit; '
    '[ -O "$1" ] && [ ! -L "$1" ] || { echo "$1 is there already, and it is not ours" >&2; exit 1; }; '
    'chmod 700 "$1" || exit; '
    'for each in /tmp/arpo-[0-9]*; do [ -d "$each" ] && [ ! -L "$each" ] && [ -O "$each" ] && echo "$each"; done; '
    'enroot list 2>/dev/null | grep -x "pyxis_arpo-[0-9]*"; :'
)
"""Makes the scratch directory. Prints the user's others, and the images that jobs unpacked on this node, one per line.
Job numbers can be guessed, so a directory of another user is refused.
No `find`: it fails if anything in /tmp goes while it looks."""
REMOVE = 'for each; do case $each in /*) rm -rf "$each" ;; *) enroot remove -f "$each" 2>/dev/null ;; esac; done; :'
"""Removes scratch directories, and unpacked images by name."""
_SHORT_S = 30.0
_REMOVE_S = 120.0
"""Time limit of a removal. An unpacked image has tens of GB in small files."""
_ALIVE_S = 20.0
OWN_VARIABLES = {"PYTHONPATH": "/nemo_run/code", "PYTHONDONTWRITEBYTECODE": "1"}
"""Variables of every process of a submitted job."""
KEPT_VARIABLES = ("SLURM_JOB_ID", "SLURM_CONF")
"""Slurm's variables to keep. The others describe the supervisor's step, and srun would take them as options."""


class NodeError(UserError):
    """A node failed a check or did not respond. Slurm may have lost it and notice later (`SlurmBackend.lost_nodes`).

    Args:
        text: message for the user.
        guilty: names of the nodes without which the job may succeed, as far as they are known.
    """

    def __init__(self, text: str, guilty: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.guilty = tuple(guilty)


@dataclass(slots=True)
class SlurmBackend:
    """Implementation of `launch.backend.Backend` for the nodes of an allocation."""

    profile: ClusterProfile
    layout: NodeLayout
    nodes: Sequence[Node]
    """Nodes of the allocation, in the order of the layout."""
    run: RunDirectory
    """Run directory, which all nodes share."""
    job_id: str
    free_ports: dict[str, list[int]] = field(default_factory=dict)
    """Free TCP ports by node name; the preflight checks set them."""

    def host(self, service: str) -> str:
        """Return the address of the process's node."""
        return self._node(service).address

    def ports(self, service: str, count: int) -> list[int]:
        """Take `count` of the free ports of the process's node. Raises UserError if too few are left."""
        free = self.free_ports[self._node(service).name]
        if len(free) < count:
            raise UserError(
                f"no TCP port is left for {service} on {self._node(service).name}: widen `ports` in the profile"
            )
        taken, free[:] = free[:count], free[count:]
        return taken

    def placement(self, config: JobConfig, engine: int) -> Placement:
        """Return the placement of an engine on its node."""
        return self.layout.placement(engine)

    def wrap_service(self, service: str, program: ServiceSpec) -> ServiceSpec:
        """Return the service as a step on its node."""
        return replace(
            program,
            command=self.step(program.name, [self._node(service)], 1, self.python(program.command), task=SERVICE),
            # Slurm ends the step when the supervisor ends. The launcher's process id means nothing on another node.
            environment={**_without_slurm(program.environment), LAUNCHER_PID_VARIABLE: "0"},
            grace_s=GRACE_S,
            restart_grace_s=GRACE_S,
            bound=True,
        )

    def ranks(self, module: str, arguments: Sequence[str], config: JobConfig) -> tuple[list[str], dict[str, str]]:
        """Return command and variables of the trainer: one task per rank (`rank.py`), spread over the trainer nodes."""
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
        """Yield a short path that exists on each node inside `prepared`."""
        yield self._scratch

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Make the scratch directory on each node, before the first container mounts it, and remove it at the end.

        A cancelled or killed job can start no step, so the next job on the node removes its directory, once Slurm
        reports that job as ended. Raises NodeError if a node cannot make the directory.
        """
        made = self._on_nodes("scratch", ["bash", "-c", MAKE_SCRATCH, "arpo", str(self._scratch)])
        if made is None or made.returncode:
            why = "no answer" if made is None else " ".join(made.stderr.split())
            raise NodeError(f"{self._scratch} cannot be made on the nodes: {why}")
        try:
            self._sweep(made.stdout.split())
            with self._image_removed():
                yield
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)  # on this node, without a step
            self._on_nodes("cleanup", ["rm", "-rf", str(self._scratch)])

    @contextmanager
    def _image_removed(self) -> Iterator[None]:
        """Remove the unpacked image at the end. If Slurm's time may be short, leave it to the next job on the node."""
        hurried = False
        try:
            yield
        except (Interrupted, StoppedError):
            hurried = True
            raise
        finally:
            if self.profile.container is not None and not hurried:
                self._remove([_unpacked(self.job_id)])

    def _sweep(self, found: Sequence[str]) -> None:
        """Remove what ended jobs left on the nodes. A job unknown to Slurm may belong to another cluster, and stays.

        An earlier start of this job may have been killed while it unpacked the image, so that is removed, too.
        """
        own = [name for name in (_unpacked(self.job_id),) if name in found]
        jobs = {name.rpartition("-")[2] for name in found} - {self.job_id}
        ended: list[str] = []
        with suppress(UserError):  # Slurm does not answer: the next job removes them
            states = slurm.job_states(sorted(job for job in jobs if job.isdecimal()))
            ended = [job for job, state in states.items() if not state.live]
        if left := [*own, *(place for job in ended for place in (str(_scratch_of(job)), _unpacked(job)))]:
            self._remove(left)

    def _remove(self, left: Sequence[str]) -> None:
        self._on_nodes("sweep", ["bash", "-c", REMOVE, "arpo", *left], _REMOVE_S)

    def _on_nodes(
        self, name: str, command: Sequence[str], limit_s: float = _SHORT_S
    ) -> "subprocess.CompletedProcess[str] | None":
        """Run a command on each node, outside containers. Return None if it takes too long."""
        step = self.step(name, self.nodes, 1, command, inside=False)
        with suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                step, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
            )
        return None

    def python(self, command: Sequence[str]) -> list[str]:
        """Return a command that starts with this Python, for the Python of the job's processes."""
        if command[0] != sys.executable:
            raise ValueError(f"a process of a job is a Python program, not {command[0]}")
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
        """Return an srun command with `tasks_per_node` tasks per node, `inside` the container if there is one."""
        return [
            *("srun", "--overlap", "--kill-on-bad-exit=1", "--cpu-bind=none", f"--job-name={name}"),
            f"--nodes={len(nodes)}",
            f"--ntasks={len(nodes) * tasks_per_node}",
            f"--ntasks-per-node={tasks_per_node}",
            f"--nodelist={','.join(node.name for node in nodes)}",
            *gpu_options(self.profile, self.layout),
            *self.profile.srun_args,
            *(self._container() if inside else ()),
            *("bash", "-c", task, "arpo", *command),
        ]

    def lost_nodes(self) -> list[str]:
        """Return the names of nodes that can no longer start a step. This takes seconds, so call it after a failure."""
        attempts = [
            (
                node.name,
                subprocess.Popen(
                    self.step("alive", [node], 1, ["true"], inside=False),
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                ),
            )
            for node in self.nodes
        ]
        deadline = time.monotonic() + _ALIVE_S
        lost = []
        for name, process in attempts:
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
        # The code is in the run directory, or with a nemo-run executor in the directory of its experiment. Every step
        # has its own /tmp (enroot mounts a tmpfs), so sockets are in the scratch directory.
        places = [self.run.path, self._scratch]
        if not Path.cwd().is_relative_to(self.run.path):
            places.append(Path.cwd())
        mounts = [*self.profile.mounts, *(f"{path}:{path}" for path in places)]
        # pyxis unpacks the image once for a name: the step `image` does it on every node, and later steps use that.
        # Without `no_exec` a step would join the namespaces of one that runs, or that ends at this moment, and its
        # mounts would be ignored. The image's ENV would win over variables that are not named here.
        names = sorted({*OWN_VARIABLES, *self.profile.environment, *self.profile.secrets})
        return [
            f"--container-image={self.profile.container}",
            f"--container-name=arpo-{self.job_id}:no_exec",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={Path.cwd()}",
            f"--container-env={','.join(names)}",
            "--no-container-mount-home",
        ]

    def _node(self, service: str) -> Node:
        kind, _, index = service.partition("-")
        if kind == "engine":
            return self.nodes[self.layout.place(int(index))[0]]
        return self.nodes[int(index) % len(self.nodes) if kind == "sandbox" and index else 0]


def _scratch_of(job_id: str) -> Path:
    return Path(f"/tmp/arpo-{job_id}")  # noqa: S108  (sockets need a short path on a local filesystem)


def _unpacked(job_id: str) -> str:
    """Return enroot's name of a job's unpacked image. (`container_scope=job` has another, which pyxis removes.)"""
    return f"pyxis_arpo-{job_id}"


def gpu_options(profile: ClusterProfile, layout: NodeLayout) -> list[str]:
    """Return the options with which a step or an allocation requests all GPUs of its nodes."""
    if not layout.gpus or profile.gpu_request == "none":
        return []
    amount = f"{profile.gpu_type}:{layout.gpus}" if profile.gpu_type else str(layout.gpus)
    return [f"--gres=gpu:{amount}" if profile.gpu_request == "gres" else f"--gpus-per-node={amount}"]


def drop_slurm_variables() -> None:
    """Remove the variables of the supervisor's own step from this process, which starts other steps."""
    for name in set(os.environ) - set(_without_slurm(os.environ)):
        del os.environ[name]


def _without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT_VARIABLES or not name.startswith(("SLURM_", "SLURMD_", "SRUN_"))
    }
