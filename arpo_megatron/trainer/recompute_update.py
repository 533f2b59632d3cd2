"""Compute a skipped update again, on all ranks (`arpo recompute-update`).

Run as `python -m arpo_megatron.trainer.recompute_update RUN_DIR FILE OUT`. It loads the newest whole checkpoint of the
update's phase, computes log-probs, loss and gradient, and writes to OUT what is finite. Weights do not change.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.optimizer import gradient_norm
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.trainer.setup import actor_session
from arpo_megatron.trainer.skipped_updates import SkippedUpdate, load_skipped_update, nonfinite_inputs
from arpo_megatron.utils.rank_main import rank_main


def recompute(actor: Actor, update: SkippedUpdate) -> Iterator[str]:
    """Yield lines that say what is finite, the same on all ranks."""
    ranks = actor.config.parallel.data  # the run may have been resumed on fewer
    packs = [replace(pack, data_rank=pack.data_rank % ranks) for pack in update.packs]
    logprobs = actor.logprobs(packs, temperature=1.0 if update.loss == "nll" else None)
    outputs = actor.accumulate(packs, update.old_logprobs, update.loss, reference_logprobs=update.reference_logprobs)
    losses: dict[int, float] = {}
    for part in parallel.gather_objects(actor.losses(packs, outputs)):
        losses.update({index: value for index, value in part.items() if math.isfinite(losses.get(index, 0.0))})
    for index, values in enumerate(logprobs):
        problems = nonfinite_inputs(update, index)
        if wrong := int((~np.isfinite(values)).sum()):
            problems.append(f"log-probs: {wrong} of {len(values)} not finite")
        if not math.isfinite(losses[index]):
            problems.append("loss not finite")
        yield f"pack {index}: {', '.join(problems) or 'finite'} (loss {losses[index]:g})"
    yield f"gradient norm: {gradient_norm(actor.optimizer):g}"
    names = sorted({name for part in parallel.gather_objects(_nonfinite_gradients(actor)) for name in part})
    if names:
        yield f"the gradient is not finite in {len(names)} weights, {', '.join(names[:3])}..."


def _nonfinite_gradients(actor: Actor) -> list[str]:
    return [
        name
        for chunk in actor.chunks
        for name, weight in chunk.named_parameters()
        if not bool(weight.main_grad.isfinite().all())
    ]


@rank_main
def main() -> None:
    """Compute the skipped update again that the command line names; every rank runs this."""
    run, update, out = RunDirectory(Path(sys.argv[1])), load_skipped_update(Path(sys.argv[2])), Path(sys.argv[3])
    with actor_session(run, update.phase, training=False) as session:
        checkpoint = session.load_newest()
        lines = [
            f"skipped update after {update.step} {'steps' if update.phase == 'train' else 'updates'}: {update.reason}",
            f"weights of {checkpoint or session.start}",
            *recompute(session.actor, update),
        ]
        if parallel.is_rank_zero():
            out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
