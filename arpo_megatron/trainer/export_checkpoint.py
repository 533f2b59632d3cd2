"""Export a checkpoint of any layout as a Hugging Face directory, with one process and the memory of one layer.

Run as `python -m arpo_megatron.trainer.export_checkpoint RUN_DIR STEP|newest OUT`, without a visible GPU.
"""

import sys
from pathlib import Path

from arpo_megatron.actor import parallel
from arpo_megatron.actor.checkpoint import CheckpointStore, find_damage, newest_intact
from arpo_megatron.actor.model import DTYPES
from arpo_megatron.actor.stored_weights import stored_tensors
from arpo_megatron.config import ParallelConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.checkpoint_dirs import step_of
from arpo_megatron.jobs.run_directory import RunDirectory, start_model
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.trainer.export_files import export_files
from arpo_megatron.utils.atomic import explain_disk_errors
from arpo_megatron.utils.code_version import code_version
from arpo_megatron.utils.rank_main import rank_main
from arpo_megatron.weights.export import write_hf


def checkpoint_path(run: RunDirectory, step: str) -> Path:
    """Return the checkpoint or the weights of a step, or the newest whole checkpoint; all ranks call it.

    Raises:
        UserError: there is none, or that step's is damaged.
    """
    if step == "newest":
        found = newest_intact(run.checkpoints)
        for line in found.warnings:
            print(f"arpo: {line}", flush=True)
        if found.path is None:
            raise UserError(f"{run.path} has no checkpoint")
        return found.path
    path = next((found for found in run.stored(step) if found.is_dir()), run.checkpoints / f"step_{step}")
    if phrases := find_damage(path):
        raise UserError(f"{path} cannot be used: {phrases[0]}")
    return path


@rank_main
def main() -> None:
    """Export the checkpoint that the command line names."""
    run, step, out = RunDirectory(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
    config = resolve.read(run.config)
    parallel.initialize(ParallelConfig(), config.seed)
    source, dtype = start_model(config, run, "train"), config.model.dtype
    spec = ModelSpec.from_hf(source)
    checkpoint = checkpoint_path(run, step)
    actor = CheckpointStore.actor_directory(checkpoint)
    files = export_files(config, run, source, step_of(checkpoint) or 0, code_version())
    with explain_disk_errors(out, "make room and give the command again"):
        write_hf(stored_tensors(actor, spec, dtype), spec, DTYPES[dtype], source, out, files=files)
    parallel.destroy()


if __name__ == "__main__":
    main()
