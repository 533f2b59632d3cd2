"""Runs a test's module on several ranks."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def torchrun(module: str, *arguments: str, ranks: int, fails: str = "", timeout_s: float = 500.0) -> str:
    """What it printed; an AssertionError with the end of that where it failed. Nothing is left running.

    Args:
        module: dotted name, e.g. tests.actor.proof.
        arguments: of the module.
        ranks: on this machine.
        fails: it must fail, and say this.
        timeout_s: then all ranks are killed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", module, *arguments]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (fails in output) if fails and process.returncode else not fails and not process.returncode, output[-4000:]
    return output
