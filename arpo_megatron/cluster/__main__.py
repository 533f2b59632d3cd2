"""`python -m arpo_megatron.cluster RUN_DIR [--sft | PROFILE COMMAND...]`: the first process of a Slurm job.

It is the supervisor of a training (`supervise.py`), or it runs an `arpo` command for the run (`commands.py`).

Slurm may send USR1 or TERM while the supervisor is still being imported. Handlers keep them from
ending it.
"""

import signal
import sys
from pathlib import Path


def main() -> None:
    """Install signal handlers, then run the job."""
    run, *more = sys.argv[1:]
    warned: list[int] = []
    for each in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(each, lambda number, _frame: warned.append(number))
    if len(more) > 1:
        from arpo_megatron.cluster.commands import run_command

        sys.exit(run_command(Path(run), Path(more[0]), more[1:]))
    from arpo_megatron.cluster.supervise import supervise

    sys.exit(supervise(Path(run), warned, only_sft=bool(more)))


if __name__ == "__main__":
    main()
