"""Start the ranks of a benchmark."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from arpo_megatron.errors import UserError
from arpo_megatron.utils.processes import bind_to_parent


def run_ranks(benchmark: str, root: Path, ranks: int) -> None:
    """Run `python -m arpo_megatron.bench.<benchmark> ROOT` on `ranks` ranks.

    Raises:
        UserError: a rank failed.
    """
    launcher = [sys.executable, "-m", "arpo_megatron.launch.ranks", str(ranks)]
    log = root / "ranks.log"
    # Not a pipe: torch's shared-memory daemon holds it, and lives as long as the engine.
    with log.open("wb") as err:
        done = subprocess.run(
            [*launcher, f"arpo_megatron.bench.{benchmark}", str(root)],
            stdout=subprocess.DEVNULL,
            stderr=err,
            check=False,
            preexec_fn=partial(bind_to_parent, os.getpid()),
        )
    if done.returncode:
        reasons = [line for line in log.read_text(errors="replace").splitlines() if "Error: " in line]
        raise UserError(f"bench {benchmark}: a rank failed: {(reasons or ['no message'])[0]}")
