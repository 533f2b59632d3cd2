"""The cold start: supervised training on demonstrations, through the same tree packs as ARPO.

Every rank runs this file (`torchrun -m arpo_megatron.sft RUN_DIR`). Which demonstrations an update sees is a function
of the seed and its number alone, so all ranks agree without talking and a resumed run goes on exactly.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from arpo_megatron import resolve
from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.checkpoint import CheckpointStore
from arpo_megatron.actor.packing import pack_minibatch
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.bad_packs import BadUpdate, dump_if_skipped
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.monitor.events import EventLog, user_errors_told
from arpo_megatron.preparation import load_conversations, load_data, load_tokenizer, model_path
from arpo_megatron.processes import die_with_parent
from arpo_megatron.ranks import rank_main
from arpo_megatron.run_directory import RunDirectory
from arpo_megatron.tasks.conversations import batch
from arpo_megatron.tasks.demonstrations import demonstrate
from arpo_megatron.tree import RolloutTree
from arpo_megatron.weights.export import export_hf
from arpo_megatron.weights.shape import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REPORT_EVERY = 10


@dataclass(frozen=True, slots=True)
class Examples:
    """What each update learns from, and what none does.

    Attributes:
        of_update: the trees of an update by its number, a pure function.
        held_out: conversations for the evaluation loss.
    """

    of_update: Callable[[int], list[RolloutTree]]
    held_out: Sequence[RolloutTree] = ()

    @classmethod
    def of(cls, config: JobConfig, tokenizer: "PreTrainedTokenizerFast") -> Self:
        """Conversations of `sft.data`, or demonstrations of the generated tasks."""
        sft_config, seed = config.sft, config.seed
        if (conversations := load_conversations(config, tokenizer)) is not None:
            kept = round(sft_config.held_out * len(conversations.trees))
            train, held_out = conversations.trees[kept:], conversations.trees[:kept]
            if not train:
                raise UserError(f"sft.held_out={sft_config.held_out} leaves none of {kept} conversations to learn from")
            return cls(lambda number: batch(train, sft_config.batch, seed=seed, update=number), held_out)
        data = load_data(config, tokenizer)

        def demonstrations(number: int) -> list[RolloutTree]:
            drawn = random.Random(f"cold-start-{seed}-{number}").choices(data.train, k=sft_config.batch)
            return demonstrate(drawn, data.facts, tokenizer, careless=sft_config.careless, seed=seed + number)

        return cls(demonstrations)


def held_out_loss(actor: Actor, trees: Sequence[RolloutTree], config: JobConfig) -> float | None:
    """Mean negative log-likelihood in nats of the tokens to learn; None without trees. A call of all ranks."""
    if not trees:
        return None
    packs = pack_minibatch(trees, supervised_credit(trees), config)
    logprobs = actor.logprobs(packs, temperature=1.0)
    return -float(sum((values * pack.weight).sum() for values, pack in zip(logprobs, packs, strict=True)))


def sft(directory: RunDirectory) -> None:
    """Train from the last checkpoint of the cold start to its end, then export to `directory.cold_start`."""
    config = resolve.load(directory.config)
    events = EventLog(directory.events, enabled=parallel.is_leader())
    start = model_path(config, directory)
    tokenizer = load_tokenizer(start)
    shape = ModelShape.from_hf(start)
    actor = Actor(config, shape, start, optimizer=config.sft.optimizer, total_updates=config.sft.steps)
    checkpoints = CheckpointStore(directory.sft_checkpoints, keep=2)
    found = checkpoints.resume_point()
    for line in found.told:
        events.emit("note", text=line)
    if found.path is not None:
        actor.load(CheckpointStore.actor_directory(found.path))
        events.emit("note", text=f"cold start resumed after {actor.updates_done} of {config.sft.steps} updates")
    events.emit("phase", name="cold start", step=0)
    examples = Examples.of(config, tokenizer)
    started, skipped = time.monotonic(), 0
    while actor.updates_done < config.sft.steps:
        number = actor.updates_done
        trees = examples.of_update(number)
        packs = pack_minibatch(trees, supervised_credit(trees), config)
        stats = actor.update(packs, None, loss="nll")
        bad = BadUpdate("sft", number, "nll", actor.unsound, packs, None) if stats.skipped else None
        skipped = dump_if_skipped(bad, skipped, directory.bad_packs, events)
        done = actor.updates_done
        if done % REPORT_EVERY == 0 or done == config.sft.steps:
            seconds = round(time.monotonic() - started, 1)
            events.emit("cold_start", update=done, updates=config.sft.steps, loss=stats.loss, seconds=seconds)
            if (held_out := held_out_loss(actor, examples.held_out, config)) is not None:
                events.emit("note", text=f"loss on {len(examples.held_out)} held-out conversations: {held_out:.4f}")
        if done % config.sft.save_every == 0 and done < config.sft.steps:
            checkpoints.save(done, actor, {})
        for report in checkpoints.reports():
            if report.error:
                events.emit("note", text=str(report))
    checkpoints.finish()
    export_hf(actor.chunks, shape, start, directory.cold_start)


@rank_main
def main() -> None:
    """Entry point of every trainer rank."""
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    config = resolve.load(directory.config)
    with user_errors_told(directory.events):
        parallel.initialize(config.parallel, config.seed)
        sft(directory)
        parallel.destroy()


if __name__ == "__main__":
    main()
