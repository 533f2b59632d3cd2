"""A tool service that is started for one measurement."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools_sandbox.utils.yaml import yaml_text


@dataclass(frozen=True, slots=True)
class Service:
    """Address and log of a service that is running."""

    url: str
    log: Path

    def isolation(self) -> str:
        """Return the isolation level that its python tool has reached."""
        return self.log.read_text().partition("python isolation: level ")[2].split()[0]


@contextmanager
def service(config: dict[str, object]) -> Iterator[Service]:
    """Run a service with a configuration on a free port. Raises RuntimeError with the reason if it does not start."""
    with tempfile.TemporaryDirectory() as name:
        file, log = Path(name) / "config.yaml", Path(name) / "log"
        file.write_text(yaml_text(config))
        command = [sys.executable, "-m", "tools_sandbox", "--port", "0", "--config", str(file)]
        with log.open("wb") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process:
            try:
                assert process.stdout is not None
                ready = process.stdout.readline().decode().split()
                if not ready:
                    raise RuntimeError(f"the service did not start: {log.read_text().strip()}")
                yield Service(ready[1], log)
            finally:
                process.terminate()
