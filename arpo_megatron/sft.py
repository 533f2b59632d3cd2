"""The cold start: supervised training on demonstrations, through the same tree packs as ARPO.

Every rank runs this file (`torchrun -m arpo_megatron.sft RUN_DIR`). Which demonstrations an update sees is a function
of the seed and its number alone, so a resumed run goes on exactly, and ranks agree without talking about any update.
"""

import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.checkpoint import CheckpointStore
from arpo_megatron.actor.optimizer import optimizer_name
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import JobConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.checkpoint_dirs import COLD_START_KEPT, resume_from
from arpo_megatron.jobs.fingerprint import fingerprint
from arpo_megatron.jobs.inputs import load_conversations, load_data, load_tokenizer, model_path
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.monitor.events import EventLog, log_user_errors
from arpo_megatron.monitor.metrics import MetricsLog
from arpo_megatron.monitor.profiler import StepProfiler, peak_memory_gb
from arpo_megatron.packing.packs import pack_batch
from arpo_megatron.tasks.sft.dataset import batch
from arpo_megatron.tasks.synthetic.demonstrations import demonstrate
from arpo_megatron.tasks.synthetic.families import FAMILIES
from arpo_megatron.trainer.batch import Batch
from arpo_megatron.trainer.metrics import pack_metrics, speed_metrics, update_metrics
from arpo_megatron.trainer.skipped_updates import SkippedUpdate, dump_if_skipped
from arpo_megatron.tree import RolloutTree
from arpo_megatron.utils.atomic import write_json, written
from arpo_megatron.utils.rank_main import rank_main
from arpo_megatron.weights.export import export_hf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REPORT_EVERY = 10
SFT_FIGURES = frozenset(
    {"loss", "grad_norm", "lr", "entropy_mean", "tokens", "updates_skipped", "expert_busiest", "expert_loss"}
)
"""Those of an update that supervised training has; there are no ratios to an old policy."""


@dataclass(frozen=True, slots=True)
class Examples:
    """What each update learns from, and what none does.

    Attributes:
        of_update: the trees of an update by its number, a pure function.
        held_out: conversations for the evaluation loss.
        conversations: to learn from; None where demonstrations are made as they are needed.
        skipped_rows: rows of the file that could not be used.
    """

    of_update: Callable[[int], list[RolloutTree]]
    held_out: Sequence[RolloutTree] = ()
    conversations: int | None = None
    skipped_rows: int = 0

    @classmethod
    def of(cls, config: JobConfig, tokenizer: "PreTrainedTokenizerFast", spec: ModelSpec) -> Self:
        """Conversations of `sft.data`, or demonstrations of the generated tasks (a call of all ranks)."""
        sft_config, seed = config.sft, config.seed
        # Rank 0 alone reads them: 10,000 conversations of 820 tokens take 42 CPU seconds; their trees are 37 MB.
        read = parallel.broadcast_object(
            load_conversations(config, tokenizer, spec) if parallel.is_rank_zero() else None
        )
        if read is not None:
            train, held_out = read.split(sft_config.held_out, seed)
            return cls(
                lambda number: batch(train, sft_config.batch, seed=seed, update=number),
                held_out,
                len(train),
                len(read.bad_rows),
            )
        data, agent = load_data(config, tokenizer), FAMILIES[config.data.kind].agent

        def demonstrations(number: int) -> list[RolloutTree]:
            drawn = random.Random(f"cold-start-{seed}-{number}").choices(data.train, k=sft_config.batch)
            return demonstrate(
                drawn, data.facts, tokenizer, mistake_share=sft_config.mistake_share, seed=seed + number, agent=agent
            )

        return cls(demonstrations)


@dataclass(slots=True)
class SftState:
    """What must survive a crash besides the actor's own checkpoint; saved with it.

    Attributes:
        tokens: that went through the model, each once.
        learnt_tokens: those among them that were learnt.
        loss: of the last update.
        held_out_loss: as last measured.
        skipped_in_a_row: updates skipped since the last one that was taken.
    """

    tokens: int = 0
    learnt_tokens: int = 0
    loss: float | None = None
    held_out_loss: float | None = None
    skipped_in_a_row: int = 0


def held_out_loss(actor: Actor, trees: Sequence[RolloutTree], config: JobConfig) -> float | None:
    """Mean negative log-likelihood in nats of the tokens to learn; None without trees. A call of all ranks."""
    if not trees:
        return None
    packs = pack_batch(trees, supervised_credit(trees), config, actor.spec)
    logprobs = actor.logprobs(packs, temperature=1.0, training=False)
    return -float(sum((values * pack.weight).sum() for values, pack in zip(logprobs, packs, strict=True)))


@dataclass(slots=True)
class SftRun:
    """One rank's hold on a cold start."""

    config: JobConfig
    directory: RunDirectory
    actor: Actor
    examples: Examples
    checkpoints: CheckpointStore
    events: EventLog
    metrics: MetricsLog | None
    profiler: StepProfiler
    state: SftState = field(default_factory=SftState)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        self.events.emit("note", text=f"optimizer: {optimizer_name(self.actor.optimizer)}")
        found = self.checkpoints.resume_point()
        for line in found.told:
            self.events.emit("note", text=line)
        if found.path is None:
            return
        self.actor.load(CheckpointStore.actor_directory(found.path))
        self.state = SftState(**self.checkpoints.load_state(found.path))
        done, steps = self.actor.updates_done, self.config.sft.steps
        self.events.emit("note", text=f"cold start resumed after {done} of {steps} updates")

    def update(self) -> None:
        """One optimizer update and its record."""
        number, started = self.actor.updates_done, time.monotonic()
        self.profiler.before(number + 1)
        trees = self.examples.of_update(number)
        packs = pack_batch(trees, supervised_credit(trees), self.config, self.actor.spec)
        stats = self.actor.update(packs, None, loss="nll")
        seconds = time.monotonic() - started
        if (trace := self.profiler.after(number + 1)) is not None:
            self.events.emit("note", text=f"profile: {trace}")
        made_by = fingerprint(self.config, self.actor.spec)
        bad = SkippedUpdate("sft", number, "nll", self.actor.nonfinite_packs, packs, None, made_by=made_by)
        self.state.skipped_in_a_row = dump_if_skipped(
            bad if stats.skipped else None,
            self.state.skipped_in_a_row,
            self.directory.skipped_updates,
            self.events,
            broadcast=parallel.broadcast_object,
        )
        self.state.tokens += sum(len(pack) for pack in packs)
        self.state.learnt_tokens += stats.tokens
        self.state.loss = stats.loss
        measured = self._measure()
        memory = parallel.gather_objects(peak_memory_gb())
        if self.metrics is None:
            return
        minibatches = [Batch(packs, trees)]
        row = {
            "step": number + 1,
            **pack_metrics(minibatches, self.actor.spec, self.config),
            **{name: value for name, value in update_metrics([stats]).items() if name in SFT_FIGURES},
            **speed_metrics(minibatches, self.actor.spec, self.config, {"update": seconds}),
            "memory_peak_gb": max(memory),
            "seconds/update": round(seconds, 3),
        }
        if self.examples.conversations is not None:
            row["epoch"] = (number + 1) * self.config.sft.batch / self.examples.conversations
        if measured is not None:
            row["held_out_loss"] = measured
        self.metrics.log(row)

    def _measure(self) -> float | None:
        """The evaluation loss, where it is due; a call of all ranks."""
        done, sft_config = self.actor.updates_done, self.config.sft
        if done % sft_config.evaluate_every and done != sft_config.steps:
            return None
        loss = held_out_loss(self.actor, self.examples.held_out, self.config)
        if loss is not None:
            self.state.held_out_loss = loss
            count = len(self.examples.held_out)
            self.events.emit("note", text=f"loss on {count} held-out conversations: {loss:.4f}")
        return loss

    def save(self) -> None:
        """A checkpoint where one is due; and say which saves have failed."""
        done, sft_config = self.actor.updates_done, self.config.sft
        if done % sft_config.save_every == 0 and done < sft_config.steps:
            self.checkpoints.save(done, self.actor, asdict(self.state))
        for report in self.checkpoints.reports():
            if report.error:
                self.events.emit("note", text=str(report))

    def stopping(self) -> bool:
        """Whether the job is asked to save and end; the same answer on all ranks."""
        return parallel.broadcast_object(parallel.is_rank_zero() and self.directory.stop.exists())

    def stop(self) -> None:
        """Save what is not saved yet."""
        self.checkpoints.finish()
        done = self.actor.updates_done
        if not parallel.broadcast_object((self.directory.sft_checkpoints / f"step_{done}").exists()):
            self.checkpoints.save(done, self.actor, asdict(self.state))
            self.checkpoints.finish()
        self.events.emit("note", text=f"asked to end: {done} updates of the cold start are done and saved")

    def finish(self, start: Path) -> None:
        """Write the result, then export the model that began as `start`: with the export the cold start is done."""
        self.checkpoints.finish()
        if parallel.is_rank_zero():
            result = {
                "updates": self.actor.updates_done,
                **asdict(self.state),
                "conversations": self.examples.conversations,
                "held_out": len(self.examples.held_out),
                "skipped_rows": self.examples.skipped_rows,
            }
            with written(self.directory.sft_result, resume_from(self.directory.sft_checkpoints)):
                write_json(self.directory.sft_result, {name: _finite(value) for name, value in result.items()})
        with written(self.directory.sft_model, resume_from(self.directory.sft_checkpoints)):
            export_hf(self.actor.chunks, self.actor.spec, start, self.directory.sft_model)


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def sft(directory: RunDirectory) -> None:
    """Train from the last checkpoint of the cold start to its end, then export to `directory.sft_model`."""
    config = resolve.load(directory.config)
    is_rank_zero = parallel.is_rank_zero()
    events = EventLog(directory.events, enabled=is_rank_zero)
    start = model_path(config, directory)
    tokenizer = load_tokenizer(start)
    spec = ModelSpec.from_hf(start)
    window = config.monitor.profile_steps if is_rank_zero or config.monitor.profile_ranks == "all" else None
    run = SftRun(
        config=config,
        directory=directory,
        actor=Actor(config, spec, start, optimizer=config.sft.optimizer, total_updates=config.sft.steps),
        examples=Examples.of(config, tokenizer, spec),
        checkpoints=CheckpointStore(directory.sft_checkpoints, COLD_START_KEPT),
        events=events,
        metrics=MetricsLog(directory.path, config, phase="sft") if is_rank_zero else None,
        profiler=StepProfiler(window, directory.profile / "sft", parallel.rank()),
    )
    run.resume()
    events.emit("phase", name="cold start", step=0)
    started = time.monotonic()
    while run.actor.updates_done < config.sft.steps:
        run.update()
        done = run.actor.updates_done
        if done % REPORT_EVERY == 0 or done == config.sft.steps:
            seconds = round(time.monotonic() - started, 1)
            events.emit("sft", update=done, updates=config.sft.steps, loss=run.state.loss, seconds=seconds)
        run.save()
        if done < config.sft.steps and run.stopping():
            run.stop()
            break
    else:
        run.finish(start)
    run.profiler.close()
    if run.metrics is not None and (rows := run.metrics.close()):
        events.emit("note", text=f"the last {rows} rows of sft_metrics.jsonl are not stored: the disk has no room")


@rank_main
def main() -> None:
    """Entry point of every trainer rank."""
    directory = RunDirectory(Path(sys.argv[1]))
    config = resolve.load(directory.config)
    with log_user_errors(directory.events):
        parallel.initialize(config.parallel, config.seed)
        sft(directory)
        parallel.destroy()


if __name__ == "__main__":
    main()
