"""The loop of supervised training, the cold start before ARPO.

The launcher runs `python -m arpo_megatron.sft RUN_DIR` on every trainer rank.
"""

import sys
from contextlib import suppress
from pathlib import Path

from arpo_megatron.errors import StoppedError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.trainer.setup import actor_session
from arpo_megatron.trainer.sft_run import SftRun
from arpo_megatron.utils.rank_main import rank_main


def sft(run: SftRun) -> None:
    """Train from the last checkpoint to the last update, then export the model."""
    while run.updates_done < run.session.config.sft.steps:
        run.update()
        run.finish_update()
    run.export()


@rank_main
def main() -> None:
    """Entry point of every trainer rank."""
    with actor_session(RunDirectory(Path(sys.argv[1])), "sft") as session, suppress(StoppedError):
        sft(SftRun.start(session))


if __name__ == "__main__":
    main()
