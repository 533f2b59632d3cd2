"""The ARPO training loop. Read `train` from top to bottom: it is the algorithm.

Every rank runs this file (`torchrun -m arpo_megatron.train RUN_DIR`). The controller alone grows trees and scores them;
the other ranks hold empty lists until `broadcast_batches` hands every rank the same packs.
"""

import sys
from contextlib import suppress
from pathlib import Path

from arpo_megatron.errors import StoppedError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.events import log_user_errors
from arpo_megatron.trainer.batch import add_reference_logprobs, broadcast_batches, build_batches
from arpo_megatron.trainer.consistency import check_on_policy
from arpo_megatron.trainer.run import TrainingRun
from arpo_megatron.trainer.setup import training_run
from arpo_megatron.utils.rank_main import rank_main


def train(run: TrainingRun) -> None:
    """Train from the last checkpoint to the last step."""
    config = run.config
    run.push_weights(version=run.state.step)
    run.evaluate()
    while run.state.step < config.train.steps:
        with run.phase("rollout"):
            scored = run.rollout()
        with run.phase("logprobs"):
            minibatches = broadcast_batches(build_batches(scored, config, run.actor.spec))
            minibatches = add_reference_logprobs(run.actor, minibatches)
            old_scores = [run.actor.scores(minibatch.packs) for minibatch in minibatches]
        with run.phase("update"):
            updates = [
                run.update(minibatch, old, on_policy=number == 0)
                for number, (minibatch, old) in enumerate(zip(minibatches, old_scores, strict=True))
            ]
        check_on_policy(updates, config)
        with run.phase("push"):
            run.push_weights(version=run.state.step + 1)
        run.finish_step(scored, minibatches, old_scores, updates)
    run.evaluate()
    run.export()


@rank_main
def main() -> None:
    """Entry point of every trainer rank."""
    directory = RunDirectory(Path(sys.argv[1]))
    with log_user_errors(directory.events), training_run(directory) as run, suppress(StoppedError):
        train(run)


if __name__ == "__main__":
    main()
