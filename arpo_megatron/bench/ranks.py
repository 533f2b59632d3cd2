"""Start the ranks of a benchmark."""

import subprocess
import sys
from pathlib import Path

from arpo_megatron.errors import UserError


def run_ranks(benchmark: str, root: Path, ranks: int) -> None:
    """Run `python -m arpo_megatron.bench.<benchmark> ROOT` on `ranks` processes of torchrun.

    Raises:
        UserError: a rank failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    log = root / "ranks.log"
    # Not a pipe: torch's shared-memory daemon holds it, and lives as long as the engine.
    with log.open("wb") as err:
        done = subprocess.run(
            [*command, "-m", f"arpo_megatron.bench.{benchmark}", str(root)],
            stdout=subprocess.DEVNULL,
            stderr=err,
            check=False,
        )
    if done.returncode:
        reasons = [line for line in log.read_text(errors="replace").splitlines() if "Error: " in line]
        raise UserError(f"bench {benchmark}: a rank failed: {(reasons or ['no message'])[0]}")
