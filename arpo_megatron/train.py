"""The ARPO training loop. Read `train` from top to bottom: it is the algorithm.

The launcher runs `python -m arpo_megatron.train RUN_DIR` on every trainer rank. Rank 0 alone talks to the rollout
process and the engines; on other ranks `trees` is empty, and `make_batches` hands every rank the same batches.
"""

import sys
from contextlib import suppress
from pathlib import Path

from arpo_megatron.errors import StoppedError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.trainer.run import TrainingRun
from arpo_megatron.trainer.setup import actor_session
from arpo_megatron.utils.rank_main import rank_main


def train(run: TrainingRun) -> None:
    """Train from the last checkpoint to the last step, then export the model."""
    run.push_weights(version=run.step)
    run.evaluate()
    while run.step < run.config.train.steps:
        with run.phase("rollout"):
            trees = run.rollout()
        with run.phase("logprobs"):
            batches = run.make_batches(trees)  # rewards -> advantages -> credit of tokens -> packs
            old_outputs = run.compute_logprobs(batches)
        with run.phase("update"):
            updates = [
                run.update(batch, old, on_policy=index == 0, last=index == len(batches) - 1)
                for index, (batch, old) in enumerate(zip(batches, old_outputs, strict=True))
            ]
        with run.phase("push"):
            run.push_weights(version=run.step + 1)
        run.end_step(trees, batches, old_outputs, updates)
        if run.step < run.config.train.steps:
            run.evaluate()  # before the save, which then holds the result; the last evaluation is after the loop
        run.save_if_due()
        run.stop_if_asked()
    run.evaluate()
    run.export()


@rank_main
def main() -> None:
    """Entry point of every trainer rank."""
    with actor_session(RunDirectory(Path(sys.argv[1])), "train") as session, suppress(StoppedError):
        train(TrainingRun.start(session))


if __name__ == "__main__":
    main()
