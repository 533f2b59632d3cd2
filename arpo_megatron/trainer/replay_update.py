"""Run a skipped update again, on all ranks (`arpo replay-pack`).

Run as `python -m arpo_megatron.trainer.replay_update RUN_DIR FILE OUT`.

Loads the newest whole checkpoint of the phase that the update belongs to, computes log-probs, loss and gradient of the
dumped minibatch, changes nothing, and writes to OUT, line by line, which quantities are finite.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.checkpoint import CheckpointStore, newest_intact
from arpo_megatron.actor.optimizer import gradient_norm
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.inputs import model_path
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.monitor.events import log_user_errors
from arpo_megatron.trainer.skipped_updates import SkippedUpdate, load_bad_update, not_finite
from arpo_megatron.utils.rank_main import rank_main


def replay(actor: Actor, bad: SkippedUpdate) -> Iterator[str]:
    """Lines on what is finite and what is not, the same on all ranks. Weights and optimizer stay as they are."""
    ranks = actor.config.parallel.data  # the run may have been resumed on fewer
    packs = [replace(pack, data_rank=pack.data_rank % ranks) for pack in bad.packs]
    logprobs = actor.logprobs(packs, temperature=1.0 if bad.loss == "nll" else None)
    outputs = actor.accumulate(packs, bad.old_logprobs, bad.loss, reference_logprobs=bad.reference_logprobs)
    losses: dict[int, float] = {}
    for part in parallel.gather_objects(actor.losses(packs, outputs)):
        losses.update({index: value for index, value in part.items() if math.isfinite(losses.get(index, 0.0))})
    for index, values in enumerate(logprobs):
        inputs = not_finite(bad, index)
        wrong = int((~np.isfinite(values)).sum())
        yield (
            f"pack {index}: inputs {_finite(not inputs)}{''.join(f' ({line})' for line in inputs)}, "
            f"log-probs {_finite(not wrong)}{f' ({wrong} of {len(values)} not finite)' if wrong else ''}, "
            f"loss {_finite(math.isfinite(losses[index]))} ({losses[index]:g})"
        )
    norm = gradient_norm(actor.optimizer)
    yield f"minibatch: gradient norm {_finite(math.isfinite(norm))} ({norm:g})"
    names = sorted({name for part in parallel.gather_objects(_nonfinite_gradients(actor)) for name in part})
    if names:
        yield f"minibatch: the gradient is not finite in {len(names)} weights, {', '.join(names[:3])}..."


def _nonfinite_gradients(actor: Actor) -> list[str]:
    return [
        name
        for chunk in actor.chunks
        for name, weight in chunk.named_parameters()
        if not bool(weight.main_grad.isfinite().all())
    ]


def _finite(condition: bool) -> str:
    return "finite" if condition else "NOT FINITE"


@rank_main
def main() -> None:
    """Entry point of every rank."""
    run, bad, out = RunDirectory(Path(sys.argv[1])), load_bad_update(Path(sys.argv[2])), Path(sys.argv[3])
    config = resolve.load(run.config)
    with log_user_errors(run.events):
        parallel.initialize(config.parallel, config.seed)
        begun = run.sft_model if bad.phase == "train" and config.sft.steps else model_path(config, run)
        optimizer = config.optimizer if bad.phase == "train" else config.sft.optimizer
        actor = Actor(config, ModelSpec.from_hf(begun), begun, optimizer=optimizer, total_updates=1)
        found = newest_intact(run.checkpoints if bad.phase == "train" else run.sft_checkpoints)
        if found.path is not None:
            actor.load(CheckpointStore.actor_directory(found.path))
        lines = [
            f"skipped update after {bad.step} {'steps' if bad.phase == 'train' else 'updates'}: {bad.told}",
            *found.told,
            f"weights of {found.path or begun}",
            *replay(actor, bad),
        ]
        if parallel.is_rank_zero():
            out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        parallel.destroy()


if __name__ == "__main__":
    main()
