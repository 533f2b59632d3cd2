"""One rank of supervised training (the cold start): demonstrations as trees, through the same packs as ARPO.

The demonstrations of an update are a function of the seed and the update's number. So a resumed run sees the same ones,
and ranks agree without communication.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Self

from arpo_megatron.actor import parallel
from arpo_megatron.actor.checkpoint import CheckpointStore
from arpo_megatron.actor.update_stats import UpdateStats
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import JobConfig
from arpo_megatron.jobs.checkpoint_dirs import disk_full_hint
from arpo_megatron.jobs.inputs import load_conversations, load_data, load_tokenizer
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.monitor.profiler import peak_memory_gb
from arpo_megatron.packing.packs import pack_batch
from arpo_megatron.tasks.sft.dataset import draw_batch
from arpo_megatron.tasks.synthetic.demonstrations import demonstrate
from arpo_megatron.tasks.synthetic.families import FAMILIES
from arpo_megatron.trainer.batch import Batch
from arpo_megatron.trainer.metrics import pack_metrics, speed_metrics, update_metrics
from arpo_megatron.trainer.setup import ActorSession
from arpo_megatron.tree import RolloutTree
from arpo_megatron.utils.atomic import explain_disk_errors, write_json
from arpo_megatron.weights.export import export_hf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REPORT_EVERY = 10
"""Updates between two lines of the progress display."""
SFT_METRICS = frozenset(
    {"loss", "grad_norm", "lr", "entropy_mean", "tokens", "updates_skipped", "expert_busiest", "expert_loss"}
)
"""Update metrics that supervised training has. There are no ratios to an old policy."""


@dataclass(frozen=True, slots=True)
class Examples:
    """The training and evaluation data of supervised training."""

    of_update: Callable[[int], list[RolloutTree]]
    """Returns the trees of an update by its number; a pure function."""
    held_out: Sequence[RolloutTree] = ()
    """Conversations for the evaluation loss."""
    conversations: int | None = None
    """Number of conversations to train on; None if demonstrations are generated."""
    skipped_rows: int = 0
    """Rows of the file that could not be used."""

    @classmethod
    def load(cls, config: JobConfig, tokenizer: "PreTrainedTokenizerFast", spec: ModelSpec) -> Self:
        """Read the conversations of `sft.data`, or prepare demonstrations of generated tasks; all ranks call it."""
        sft, seed = config.sft, config.seed
        # Rank 0 alone reads them: 10,000 conversations of 820 tokens take 42 CPU seconds; their trees are 37 MB.
        read = parallel.broadcast_object(
            load_conversations(config, tokenizer, spec) if parallel.is_rank_zero() else None
        )
        if read is not None:
            train, held_out = read.split(sft.held_out_share, seed)
            return cls(
                lambda number: draw_batch(train, sft.batch, seed=seed, update=number),
                held_out,
                len(train),
                len(read.bad_rows),
            )
        data, agent = load_data(config, tokenizer), FAMILIES[config.data.kind].agent

        def demonstrations(number: int) -> list[RolloutTree]:
            drawn = random.Random(f"cold-start-{seed}-{number}").choices(data.train, k=sft.batch)
            return demonstrate(
                drawn, data.facts, tokenizer, mistake_share=sft.mistake_share, seed=seed + number, agent=agent
            )

        return cls(demonstrations)


@dataclass(slots=True)
class SftState:
    """State of a supervised run that a checkpoint keeps as state.json, besides the actor's own files."""

    tokens: int = 0
    """Tokens that went through the model, shared ones once."""
    learnt_tokens: int = 0
    """Tokens among them that had a loss."""
    loss: float | None = None
    """Loss of the last update."""
    held_out_loss: float | None = None
    """Last evaluation loss."""
    skipped_in_a_row: int = 0
    """Updates skipped since the last one that was taken."""


@dataclass(slots=True)
class SftRun:
    """One rank of supervised training between its set-up and its export."""

    session: ActorSession
    examples: Examples
    state: SftState = field(default_factory=SftState)
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, session: ActorSession) -> Self:
        """Load the examples, and resume from the newest checkpoint."""
        run = cls(session, Examples.load(session.config, load_tokenizer(session.start), session.actor.spec))
        if (checkpoint := session.load_newest()) is not None:
            run.state = SftState(**CheckpointStore.load_state(checkpoint))
            text = f"cold start resumed after {run.updates_done} of {session.config.sft.steps} updates"
            session.note(text, resumed=True)
        session.events.emit("phase", name="cold start", step=0)
        return run

    @property
    def updates_done(self) -> int:
        """Number of updates so far, also those of earlier processes."""
        return self.session.actor.updates_done

    def update(self) -> None:
        """Make one optimizer update and log its metrics."""
        session, number, started = self.session, self.updates_done, time.monotonic()
        session.profiler.before(number + 1)
        trees = self.examples.of_update(number)
        packs = pack_batch(trees, supervised_credit(trees), session.config, session.actor.spec)
        session.prepare_kernels(packs)
        stats = session.actor.update(packs, None, loss="nll")
        seconds = time.monotonic() - started
        session.end_profile(number + 1)
        self.state.skipped_in_a_row = session.handle_skipped_update(
            self.state.skipped_in_a_row, skipped=stats.skipped, step=number, loss="nll", packs=packs
        )
        self.state.tokens += sum(len(pack) for pack in packs)
        self.state.learnt_tokens += stats.tokens
        self.state.loss = stats.loss
        self._log(Batch(packs, trees), stats, seconds)

    def finish_update(self) -> None:
        """Report the progress, save a checkpoint if one is due, and end here if the job is asked to.

        Raises:
            StoppedError: it is; everything is saved.
        """
        done, sft = self.updates_done, self.session.config.sft
        if done % REPORT_EVERY == 0 or done == sft.steps:
            seconds = round(time.monotonic() - self.started, 1)
            self.session.events.emit("sft", update=done, updates=sft.steps, loss=self.state.loss, seconds=seconds)
        if done % sft.save_every == 0 and done < sft.steps:
            self.save()
        self.session.log_saves()
        if done < sft.steps and self.session.stopping():
            self.session.stop(done, self.save)

    def save(self) -> None:
        """Start to write a checkpoint of the policy and of the finished updates."""
        self.session.save(self.updates_done, asdict(self.state))

    def export(self) -> None:
        """Write the result, then the model as a Hugging Face directory; with that the cold start is done."""
        session, directory = self.session, self.session.directory
        session.log_saves(wait=True)
        hint = disk_full_hint(directory.sft_checkpoints)
        if parallel.is_rank_zero():
            result = {
                "updates": self.updates_done,
                **asdict(self.state),
                "conversations": self.examples.conversations,
                "held_out": len(self.examples.held_out),
                "skipped_rows": self.examples.skipped_rows,
            }
            with explain_disk_errors(directory.sft_result, hint):
                write_json(directory.sft_result, {name: _finite(value) for name, value in result.items()})
        with explain_disk_errors(directory.sft_model, hint):
            export_hf(session.actor.chunks, session.actor.spec, session.start, directory.sft_model)

    def _log(self, batch: Batch, stats: UpdateStats, seconds: float) -> None:
        session, spec, config = self.session, self.session.actor.spec, self.session.config
        evaluated = self._evaluate()
        memory = parallel.gather_objects(peak_memory_gb())
        if session.metrics is None:
            return
        row = {
            "step": self.updates_done,
            **pack_metrics([batch], spec, config),
            "attention_kernels": len(session.kernels.needed),
            **{name: value for name, value in update_metrics([stats]).items() if name in SFT_METRICS},
            **speed_metrics([batch], spec, config, {"update": seconds}),
            "memory_peak_gb": max(memory),
            "seconds/update": round(seconds, 3),
        }
        if self.examples.conversations is not None:
            row["epoch"] = self.updates_done * config.sft.batch / self.examples.conversations
        if evaluated is not None:
            row["held_out_loss"] = evaluated
        session.metrics.log(row)

    def _evaluate(self) -> float | None:
        """Measure the evaluation loss if it is due."""
        done, sft = self.updates_done, self.session.config.sft
        if done % sft.evaluate_every and done != sft.steps:
            return None
        loss = held_out_loss(self.session, self.examples.held_out)
        if loss is not None:
            self.state.held_out_loss = loss
            self.session.note(f"loss on {len(self.examples.held_out)} held-out conversations: {loss:.4f}")
        return loss


def held_out_loss(session: ActorSession, trees: Sequence[RolloutTree]) -> float | None:
    """Return the mean negative log-likelihood in nats over tokens with a loss; None without trees.

    All ranks call it.
    """
    if not trees:
        return None
    packs = pack_batch(trees, supervised_credit(trees), session.config, session.actor.spec)
    session.prepare_kernels(packs)
    logprobs = session.actor.logprobs(packs, temperature=1.0, training=False)
    return -float(sum((values * pack.weight).sum() for values, pack in zip(logprobs, packs, strict=True)))


def _finite(value: float | None) -> float | None:
    """Return None for a number that JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None
