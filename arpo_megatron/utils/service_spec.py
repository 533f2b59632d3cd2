"""How a supervised service is started and probed."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from arpo_megatron.utils.processes import (
    die_with_parent,
)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A service that can be started again and again at one address.

    Attributes:
        name: of the role, and of its log.
        url: http://host:port.
        command: what to run.
        log: where its output goes; an old file is continued.
        environment: all of its variables.
        startup_timeout_s: from start to the first 200 of `ready`.
        hang_timeout_s: longest time without a 200 of `alive`.
        ready: path that answers 200 when the service does its work.
        alive: path that answers 200 while it lives; it must cost nothing and disturb nothing.
        grace_s: seconds between SIGTERM and SIGKILL when the job ends; 0: killed outright.
        restart_grace_s: the same before it is started again. (srun ends its step on a SIGTERM, and cannot on
            a SIGKILL.)
        held_by: while this file exists, the program is not started again.
        bound: the kernel kills it with the thread that started it. (An engine watches its launcher itself.)
    """

    name: str
    url: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    startup_timeout_s: float
    hang_timeout_s: float
    ready: str = "/health"
    alive: str = "/health"
    grace_s: float = 0.0
    restart_grace_s: float = 0.0
    held_by: Path | None = None
    bound: bool = True

    def start(self) -> "subprocess.Popen[bytes]":
        """Start it in a session of its own; does not wait until it is ready."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
                preexec_fn=die_with_parent if self.bound else None,  # noqa: PLW1509  (one prctl call)
            )
