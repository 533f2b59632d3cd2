"""`python -m arpo_megatron.cluster.prepare RUN_DIR`: the preparation of a job, as a step with the job's packages."""

import sys
from pathlib import Path

from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.inputs import check_files
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.job import prepare_run
from arpo_megatron.monitor.events import EventLog, log_user_errors
from arpo_megatron.utils.rank_main import rank_main


@rank_main
def main() -> None:
    """Prepare the run and write progress and errors to its events."""
    run = RunDirectory(Path(sys.argv[1]))
    config, events = resolve.load(run.config), EventLog(run.events)
    with log_user_errors(run.events):
        check_files(config, run)
        for line in prepare_run(config, run, lambda text: events.emit("progress", text=text)):
            events.emit("note", text=line)


if __name__ == "__main__":
    main()
