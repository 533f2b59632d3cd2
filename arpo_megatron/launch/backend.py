"""Where the roles of a job run: this machine, or the nodes of a Slurm allocation (`cluster/backend.py`)."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from arpo_megatron.config import JobConfig
from arpo_megatron.engine.launch import SCRATCH_PREFIX
from arpo_megatron.hardware.placement import Placement, placement
from arpo_megatron.utils.ports import free_ports
from arpo_megatron.utils.processes import JOB_PID
from arpo_megatron.utils.service_spec import ServiceSpec
from tools_sandbox.utils.temporary import TemporaryFolder


class Backend(Protocol):
    """What starting a role depends on. Roles are `sandbox`, `router` and `engine-0`, `engine-1`, ..."""

    def host(self, role: str) -> str:
        """Address on which a role's service listens."""

    def ports(self, role: str, count: int) -> list[int]:
        """Free TCP ports there, none of which was given before."""

    def placement(self, config: JobConfig, engine: int) -> Placement:
        """Where engine number `engine` computes."""

    def place(self, role: str, program: ServiceSpec) -> ServiceSpec:
        """The program as it is started from here."""

    def ranks(self, module: str, arguments: Sequence[str], config: JobConfig) -> tuple[list[str], dict[str, str]]:
        """The command that runs `python -m module arguments...` on every trainer rank, and variables it needs."""

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory for short-lived files on the machine of each role."""


@dataclass(slots=True)
class LocalBackend:
    """Everything on this machine, the ranks under torchrun."""

    _given: set[int] = field(default_factory=set)

    def host(self, role: str) -> str:
        """The loopback address."""
        return "127.0.0.1"

    def ports(self, role: str, count: int) -> list[int]:
        """As the protocol says. Raises UserError where there are none."""
        found: list[int] = []
        while len(found) < count:
            fresh = [port for port in free_ports(count) if port not in self._given]
            found += fresh[: count - len(found)]
            self._given.update(found)
        return found

    def placement(self, config: JobConfig, engine: int) -> Placement:
        """On this machine's GPUs, if it has any."""
        return placement(config).of_engine(engine, config.engine)

    def place(self, role: str, program: ServiceSpec) -> ServiceSpec:
        """As it is."""
        return program

    def ranks(self, module: str, arguments: Sequence[str], config: JobConfig) -> tuple[list[str], dict[str, str]]:
        """Under torchrun; a rank ends when this process has ended."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
        count = f"--nproc-per-node={config.parallel.world_size}"
        return [*torchrun, count, sys.executable, "-m", module, *arguments], {JOB_PID: str(os.getpid())}

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Made now, removed at the end, or by the next job of this machine where this one is killed."""
        folder = TemporaryFolder(SCRATCH_PREFIX)
        try:
            yield folder.path
        finally:
            folder.remove()
