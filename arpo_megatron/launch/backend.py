"""Where the processes of a job run: this machine, or the nodes of a Slurm allocation (`cluster/backend.py`)."""

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
from arpo_megatron.utils.service_spec import ServiceSpec
from arpo_megatron.utils.temporary import temporary_folder


class Backend(Protocol):
    """The machines of a job. A service is named `rollout`, `router`, `sandbox-0`, ..., or `engine-0`, ..."""

    def host(self, service: str) -> str:
        """Return the address on which a service listens."""

    def ports(self, service: str, count: int) -> list[int]:
        """Return free TCP ports of the service's machine, different ones at each call."""

    def placement(self, config: JobConfig, engine: int) -> Placement:
        """Return where engine number `engine` computes."""

    def wrap_service(self, service: str, spec: ServiceSpec) -> ServiceSpec:
        """Return the service as it is started from this machine."""

    def ranks(self, module: str, arguments: Sequence[str], config: JobConfig) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs `python -m module arguments...` on every trainer rank, and its variables."""

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a directory for short-lived files, which exists on the machine of each service."""


@dataclass(slots=True)
class LocalBackend:
    """All processes on this machine, the ranks under `launch/ranks.py`."""

    _given: set[int] = field(default_factory=set)

    def host(self, service: str) -> str:
        """Return the loopback address, which all services of this machine share."""
        return "127.0.0.1"

    def ports(self, service: str, count: int) -> list[int]:
        """Return free ports. Raises UserError if there are none."""
        found: list[int] = []
        while len(found) < count:
            fresh = [port for port in free_ports(count) if port not in self._given]
            found += fresh[: count - len(found)]
            self._given.update(found)
        return found

    def placement(self, config: JobConfig, engine: int) -> Placement:
        """Place the engine on this machine's GPUs, if it has any."""
        return placement(config).of_engine(engine, config.engine)

    def wrap_service(self, service: str, spec: ServiceSpec) -> ServiceSpec:
        """Return the service unchanged: every service runs on this machine."""
        return spec

    def ranks(self, module: str, arguments: Sequence[str], config: JobConfig) -> tuple[list[str], dict[str, str]]:
        """Run the ranks under their launcher; they die with it, and it dies with this process."""
        launcher = [sys.executable, "-m", "arpo_megatron.launch.ranks", str(config.parallel.world_size)]
        return [*launcher, module, *arguments], {}

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a temporary directory; if this job is killed, the next job of this machine removes it.

        Raises:
            UserError: there is no room for it, or no file locks.
        """
        folder = temporary_folder(SCRATCH_PREFIX)
        try:
            yield folder.path
        finally:
            folder.remove()
