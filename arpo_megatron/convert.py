"""Checkpoint to Hugging Face directory, on all ranks: `python -m arpo_megatron.convert RUN_DIR STEP_DIR OUT`."""

import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from arpo_megatron import resolve
from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.checkpoint import CheckpointStore
from arpo_megatron.preparation import model_path
from arpo_megatron.processes import die_with_parent
from arpo_megatron.run_directory import RunDirectory
from arpo_megatron.weights.export import export_hf
from arpo_megatron.weights.shape import ModelShape


@record  # a failing rank is named by torchrun with its traceback
def main() -> None:
    """Entry point of every rank."""
    die_with_parent()
    run, checkpoint, out = RunDirectory(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    config = resolve.load(run.config)
    parallel.initialize(config.parallel, config.seed)
    try:
        start = model_path(config, run)
        shape = ModelShape.from_hf(start)
        updates = config.train.steps * config.algorithm.minibatches
        actor = Actor(config, shape, start, optimizer=config.optimizer, total_updates=updates)
        actor.load(CheckpointStore.actor_directory(checkpoint))
        export_hf(actor.chunks, shape, start, out)
    finally:
        parallel.destroy()


if __name__ == "__main__":
    main()
