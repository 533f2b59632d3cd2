"""`python -m arpo_megatron.cluster RUN_DIR`: the supervisor of a Slurm job (`supervise.py`).

Slurm may send USR1 or TERM while the supervisor is still being imported. Handlers keep them from
ending it.
"""

import signal
import sys
from pathlib import Path


def main() -> None:
    """Install signal handlers, then run the job."""
    warned: list[int] = []
    for each in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(each, lambda number, _frame: warned.append(number))
    from arpo_megatron.cluster.supervise import supervise

    sys.exit(supervise(Path(sys.argv[1]), warned))


if __name__ == "__main__":
    main()
