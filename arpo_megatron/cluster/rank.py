"""`python -m arpo_megatron.cluster.rank MODULE ARGUMENTS...`: a trainer rank that Slurm has started.

Slurm is the launcher: it starts one task per rank. Signals reach the rank itself, and the first rank that fails ends
the step (srun --kill-on-bad-exit). The variables that torch reads are set from Slurm's.
"""

import os
import runpy
import sys

FROM_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
RANKS_PER_NODE = "ARPO_RANKS_PER_NODE"
"""Environment variable of a rank. Slurm has one too, but it is a list that must be parsed."""


def main() -> None:
    """Set the variables that torch reads and run the module like `python -m`."""
    os.environ |= {name: os.environ[source] for name, source in FROM_SLURM.items()}
    os.environ["LOCAL_WORLD_SIZE"] = os.environ[RANKS_PER_NODE]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
