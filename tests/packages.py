"""Debian packages for campaigns, installed without starting their services."""

import os
import shutil
import subprocess
from pathlib import Path

INSTALL = Path(__file__).resolve().parents[1] / "slurm" / "onebox" / "install.sh"


def install(program: str, package: str) -> str:
    """Install the package of a program if that is missing. Return the reason if this fails, else an empty string."""
    if shutil.which(program):
        return ""
    if shutil.which("apt-get") is None or os.getuid():
        return f"no {program}, and only root with apt-get can install one"
    done = subprocess.run([INSTALL, package], capture_output=True, text=True, timeout=180)
    return "" if done.returncode == 0 else done.stderr[-200:]
