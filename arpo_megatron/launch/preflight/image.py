"""`python -m arpo_megatron.launch.preflight.image`: check a container image, as the last step of `make image`.

It runs in the image, in a clone. Without a GPU it cannot see whether the driver fits. The isolation of tools depends on
the machine, so each job checks that itself.
"""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from arpo_megatron.hardware.placement import gpu_count
from arpo_megatron.launch.preflight.check import CheckResult, failure, ok, run_checks, show
from arpo_megatron.launch.preflight.machine import check_gpus, check_packages, check_pins, check_python

LOCK = Path("slurm/container/requirements.lock")
_IMPORT_S = 300.0
_USED = ("torch", "sglang", "sgl_kernel", "flashinfer", "megatron.core", "transformer_engine.pytorch", "sglang_router")
"""Modules that a job imports on GPUs."""


def main() -> None:
    """Print one line per check. The exit code is 1 if one has failed."""
    gpus = gpu_count("auto")
    checks = [
        ("python", check_python),
        ("lock", lambda: check_lock(LOCK)),
        ("pins", lambda: check_pins(on_gpus=True)),
        ("packages", lambda: check_packages(None, on_gpus=True)),
        ("imports", check_imports),
        *([("gpu", lambda: check_gpus(gpus))] if gpus else []),
    ]
    sys.exit(not show(run_checks(checks, _IMPORT_S, len(checks) * _IMPORT_S)))


def check_lock(lock: Path) -> CheckResult:
    """Check that every package of the lock file is installed in its version there."""
    locked = re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
    odd = []
    for name, wanted in locked:
        try:
            found = version(name).split("+")[0]
        except PackageNotFoundError:
            odd.append(f"{name} is missing")
            continue
        if found != wanted.split("+")[0]:
            odd.append(f"{name} {found} instead of {wanted}")
    if odd:
        return failure("lock", ", ".join(odd), "build the image again from this clone: make image")
    return ok("lock", f"{len(locked)} packages in their versions")


def check_imports() -> CheckResult:
    """Import what a job uses, in a process of its own: a library for another CUDA may end the process."""
    for module in _USED:
        command = [sys.executable, "-c", f"import {module}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S, check=False)
        if done.returncode:
            why = (done.stderr.splitlines() or ["it was killed"])[-1][:200]
            return failure("imports", f"{module}: {why}", "look at the versions above, or at the base image's CUDA")
    return ok("imports", ", ".join(_USED))


if __name__ == "__main__":
    main()
