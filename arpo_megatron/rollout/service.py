"""How the rollout process is started, and where it listens."""

import os
import sys
from pathlib import Path

from arpo_megatron.utils.service_spec import ServiceSpec

_STARTUP_S = 180.0


def rollout_service(directory: Path, port: int, *, log_path: Path, hang_timeout_s: float) -> ServiceSpec:
    """Return how to start the rollout process.

    Args:
        directory: parent of the socket's folder (`rollout_socket`), which only this user may enter.
        port: free port on 127.0.0.1 for the health check of its event loop.
        log_path: file for its output.
        hang_timeout_s: see `ServiceSpec`.
    """
    command = [sys.executable, "-m", "arpo_megatron.rollout.worker", str(rollout_socket(directory)), str(port)]
    return ServiceSpec(
        name="rollout",
        url=f"http://127.0.0.1:{port}",
        command=command,
        log=log_path,
        environment={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        startup_timeout_s=_STARTUP_S,
        hang_timeout_s=hang_timeout_s,
    )


def rollout_socket(directory: Path) -> Path:
    """Return the socket of the process that was started with this directory."""
    return directory / "rollout" / "socket"
