"""The description of a process that a job starts."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from arpo_megatron.utils.processes import bind_to_parent


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """Command and environment of a process of a job, and the probe that checks that it works."""

    name: str
    """Name in messages and in `arpo health`."""
    command: Sequence[str]
    log: Path
    """File for its output, which is appended."""
    environment: Mapping[str, str]
    """All of its variables."""
    url: str = ""
    """http://host:port that is probed. A process without it runs once: it is not restarted when it ends."""
    startup_timeout_s: float = 0.0
    """Time from the start to the first 200 of `ready`."""
    hang_timeout_s: float = 0.0
    """Longest time without a 200 of `alive`."""
    ready: str = "/health"
    """Path that answers 200 when the service can work."""
    alive: str = "/health"
    """Path that answers 200 while the service lives, at no cost."""
    grace_s: float = 0.0
    """Time between SIGTERM and SIGKILL when the job ends; 0: killed at once."""
    restart_grace_s: float = 0.0
    """The same before a restart. (srun ends its step on a SIGTERM, and cannot on a SIGKILL.)"""
    held_by: Path | None = None
    """The service is not restarted while this file exists."""
    bound: bool = True
    """The kernel kills it with the thread that started it. (An engine watches its launcher itself.)"""

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the process in a session of its own, so that a ctrl-C does not reach it. Does not wait."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
                preexec_fn=partial(bind_to_parent, os.getpid()) if self.bound else None,  # noqa: PLW1509  (prctl and getppid only)
            )
