"""Convert a checkpoint to a Hugging Face directory, on all ranks.

Run as `python -m arpo_megatron.trainer.export_checkpoint RUN_DIR STEP|newest OUT`.
"""

import sys
from pathlib import Path

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.checkpoint import CheckpointStore, find_damage, newest_intact
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.inputs import model_path
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.monitor.events import EventLog, log_user_errors
from arpo_megatron.utils.atomic import written
from arpo_megatron.utils.rank_main import rank_main
from arpo_megatron.weights.export import export_hf


def whole_checkpoint(run: RunDirectory, wanted: str) -> Path:
    """The checkpoint of a step, or the newest whole one; what is not used, and why, becomes an event.

    Raises:
        UserError: there is none, or that step's is damaged.
    """
    if wanted != "newest":
        path = run.checkpoints / f"step_{wanted}"
        if phrases := find_damage(path):
            raise UserError(f"{path} cannot be used: {phrases[0]}")
        return path
    found = newest_intact(run.checkpoints)
    if found.path is None:
        raise UserError(f"{run.path} has no checkpoint")
    for line in found.told:
        EventLog(run.events, enabled=parallel.is_rank_zero()).emit("note", text=line)
    return found.path


@rank_main
def main() -> None:
    """Entry point of every rank."""
    run, out = RunDirectory(Path(sys.argv[1])), Path(sys.argv[3])
    config = resolve.load(run.config)
    with log_user_errors(run.events):
        parallel.initialize(config.parallel, config.seed)
        start = model_path(config, run)
        spec = ModelSpec.from_hf(start)
        updates = config.train.steps * config.algorithm.minibatches
        actor = Actor(config, spec, start, optimizer=config.optimizer, total_updates=updates)
        actor.load(CheckpointStore.actor_directory(whole_checkpoint(run, sys.argv[2])))
        with written(out, "make room and give the command again"):
            export_hf(actor.chunks, spec, start, out)
        parallel.destroy()


if __name__ == "__main__":
    main()
