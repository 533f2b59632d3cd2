"""The version of the code that runs."""

import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path


def code_version() -> str:
    """Return the commit of the code, with `-dirty` if files differ from it; outside a clone, the package's version."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with suppress(OSError):
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return f"commit {done.stdout.strip()}"
    return f"version {metadata.version('arpo-megatron')}"
