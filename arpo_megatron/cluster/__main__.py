"""`python -m arpo_megatron.cluster RUN_DIR`: the role supervisor of a Slurm job (`job.py`).

Slurm's warning, and TERM, may come while it is still being imported, and would end a process that does not listen yet.
"""

import signal
import sys
from pathlib import Path


def main() -> None:
    """Entry point."""
    warned: list[int] = []
    for each in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(each, lambda number, _frame: warned.append(number))
    from arpo_megatron.cluster.supervise import supervise

    sys.exit(supervise(Path(sys.argv[1]), warned))


if __name__ == "__main__":
    main()
