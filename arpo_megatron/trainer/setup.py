"""Set-up of a training rank: model, checkpoints and logs, opened and closed in one place.

Used by `train`, `sft` and `recompute_update`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.checkpoint import CheckpointStore
from arpo_megatron.actor.optimizer import optimizer_name
from arpo_megatron.actor.training_state import WeightsOnly
from arpo_megatron.actor.warm_up import AttentionKernels
from arpo_megatron.algorithms.credit import LossForm
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import StoppedError, UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.checkpoint_dirs import SFT_CHECKPOINTS_KEPT, best_checkpoints
from arpo_megatron.jobs.run_directory import Phase, RunDirectory, start_model
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.monitor.events import EventLog, log_user_errors
from arpo_megatron.monitor.metrics import MetricsLog
from arpo_megatron.monitor.profiler import StepProfiler
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.trainer.skipped_updates import SkippedUpdate, save_skipped_update
from arpo_megatron.tree import Float32Array
from arpo_megatron.utils.heartbeat import start_heartbeat
from arpo_megatron.utils.rank_main import log_failure

MAX_SKIPPED_UPDATES = 3
"""Updates skipped in a row that end the run."""
_NO_FILES: Mapping[str, Callable[[], bytes]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ActorSession:
    """One rank of a training phase, as `actor_session` sets it up."""

    config: JobConfig
    directory: RunDirectory
    phase: Phase
    start: Path
    """Hugging Face directory that the phase starts from."""
    actor: Actor
    checkpoints: CheckpointStore
    events: EventLog
    """Enabled on rank 0 only."""
    metrics: MetricsLog | None
    """None on ranks other than 0, and for a command that trains nothing."""
    profiler: StepProfiler
    closing: ExitStack
    """Closes the session's resources; whatever a phase adds to it is closed first."""
    kernels: AttentionKernels
    """Compiled attention."""
    weights: CheckpointStore | None = None
    """Weights without the optimizer (`train.weights_every`)."""

    def note(self, text: str, *, resumed: bool = False) -> None:
        """Log a line for the user; `resumed` marks that the job has continued from a checkpoint."""
        self.events.emit("note", text=text, **({"resumed": True} if resumed else {}))

    def prepare_kernels(self, packs: Iterable[TreePack]) -> None:
        """Compile the attention of packs ahead of their passes; all ranks call it with the same packs."""
        self.kernels.prepare(packs, self.note)

    def load_newest(self) -> Path | None:
        """Load the actor from the newest whole checkpoint and return its directory; None if there is none.

        Raises:
            UserError: there are checkpoints, but all are damaged.
        """
        if self.metrics is not None:
            self.note(f"optimizer: {optimizer_name(self.actor.optimizer)}")
        found = self.checkpoints.resume_point()
        for line in found.warnings:
            self.note(line)
        if found.path is not None:
            self.actor.load(CheckpointStore.actor_directory(found.path))
        return found.path

    def save(self, step: int, state: dict[str, Any], files: Mapping[str, Callable[[], bytes]] = _NO_FILES) -> None:
        """Start to write the checkpoint of `step`; see `CheckpointStore.save`."""
        self.checkpoints.save(step, self.actor, state, files)

    def save_weights(self, step: int) -> None:
        """Start to write the weights alone, if `train.weights_every` is set and this step is due."""
        every = self.config.train.weights_every
        if self.weights is not None and every and step % every == 0:
            self.weights.save(step, WeightsOnly(self.actor.chunks), {"step": step})

    def log_saves(self, *, wait: bool = False) -> bool:
        """Log the saves that failed since the last call; with `wait`, finish the one in flight first.

        Returns:
            Whether none has failed.
        """
        stores = [store for store in (self.checkpoints, self.weights) if store is not None]
        for store in stores if wait else ():
            store.finish()
        failed = [report for store in stores for report in store.reports() if report.error]
        for report in failed:
            self.note(str(report))
        return not failed

    def stopping(self) -> bool:
        """Whether the job is asked to save and end; the same answer on all ranks."""
        return parallel.broadcast_object(parallel.is_rank_zero() and self.directory.stop.exists())

    def stop(self, step: int, save: Callable[[], None]) -> NoReturn:
        """Save what is not saved yet and end the phase on all ranks.

        Args:
            step: finished steps (updates, for supervised training).
            save: starts the checkpoint of `step`.

        Raises:
            StoppedError: always.
        """
        saved = True
        self.log_saves(wait=True)
        if step and not parallel.broadcast_object((self.checkpoints.root / f"step_{step}").exists()):
            save()
            saved = self.log_saves(wait=True)
        done = f"{step} {'steps' if self.phase == 'train' else 'updates'} are done"
        self.note(f"asked to end: {done}" + (" and saved" if saved else ", but not all are saved"))
        raise StoppedError

    def handle_skipped_update(
        self,
        in_a_row: int,
        *,
        skipped: bool,
        step: int,
        loss: LossForm,
        packs: Sequence[TreePack],
        old_logprobs: Sequence[Float32Array] | None = None,
        reference_logprobs: Sequence[Float32Array] | None = None,
    ) -> int:
        """Dump the last update if it was skipped; return how many were skipped in a row.

        Raises:
            UserError: too many were.
        """
        if not skipped:
            return 0
        update = SkippedUpdate(
            phase=self.phase,
            step=step,
            loss=loss,
            suspects=self.actor.nonfinite_packs,
            packs=packs,
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
        )
        return dump_skipped_update(update, in_a_row, self.directory.skipped_updates, self.events)

    def end_profile(self, step: int) -> None:
        """Log the trace of the profiler if `step` was the last one of its window."""
        if (trace := self.profiler.after(step)) is not None:
            self.note(f"profile: {trace}")


def dump_skipped_update(update: SkippedUpdate, skipped_before: int, folder: Path, events: EventLog) -> int:
    """Dump and log a skipped update; all ranks call it, and rank 0 (whose `events` are enabled) writes.

    Returns:
        The updates skipped in a row: this one, and the `skipped_before` ones before it.

    Raises:
        UserError: they are `MAX_SKIPPED_UPDATES`.
    """
    hint = ""
    if events.enabled:
        try:
            hint = f"arpo recompute-update {save_skipped_update(folder, update)} shows what is not finite"
        except OSError as error:
            hint = f"it could not be dumped: {error}"
    hint = parallel.broadcast_object(hint)  # any rank's error may be the one that the user reads
    events.emit("note", text=f"an update was skipped: {update.reason}; {hint}")
    if skipped_before + 1 < MAX_SKIPPED_UPDATES:
        return skipped_before + 1
    raise UserError(f"{MAX_SKIPPED_UPDATES} updates in a row were skipped; the last: {update.reason}; {hint}")


@contextmanager
def actor_session(directory: RunDirectory, phase: Phase, *, training: bool = True) -> Iterator[ActorSession]:
    """Set up this rank for a phase of a run and close everything at the end, whatever happens inside.

    Args:
        directory: run directory with its config.
        phase: decides the first weights, the optimizer and the checkpoints.
        training: False for a command that only loads a checkpoint: it has no metrics and no reference policy.
    """
    with log_user_errors(directory.events), ExitStack() as closing:
        try:
            yield _open(directory, phase, training, closing)
        except BaseException as error:
            log_failure(error)  # before the clean-up, which may take long and which other ranks may notice
            raise
    # Not after a failure: a failed rank leaves its groups only when it ends, so that it is the first to report.
    parallel.destroy()


def _open(directory: RunDirectory, phase: Phase, training: bool, closing: ExitStack) -> ActorSession:
    config = resolve.load(directory.config)
    start_heartbeat(directory.heartbeats, parallel.rank(), config.parallel.collective_timeout_s)
    parallel.initialize(config.parallel, config.seed)
    is_rank_zero = parallel.is_rank_zero()
    events = EventLog(directory.events, enabled=is_rank_zero)

    def note(text: str) -> None:
        events.emit("note", text=text)

    start, weights = start_model(config, directory, phase), None
    train = config.train
    if phase == "sft":
        optimizer, updates = config.sft.optimizer, config.sft.steps
        checkpoints = CheckpointStore(directory.sft_checkpoints, SFT_CHECKPOINTS_KEPT, log=note)
    else:
        optimizer, updates = config.optimizer, train.steps * config.algorithm.minibatches
        checkpoints = CheckpointStore(
            directory.checkpoints,
            train.keep_checkpoints,
            train.keep_every,
            lambda paths: best_checkpoints(paths, directory.held_out, train.keep_best),
            log=note,
        )
        if train.weights_every and training:
            weights = CheckpointStore(directory.weights, 1, keep_every=1, log=note, group="weights")
    actor = Actor(
        config,
        ModelSpec.from_hf(start),
        start,
        optimizer=optimizer,
        total_updates=updates,
        keep_reference=training and phase == "train" and config.algorithm.kl_coefficient > 0,
    )
    metrics = None
    if training and is_rank_zero:
        metrics = MetricsLog(directory.path, config, phase="sft" if phase == "sft" else "")
        closing.callback(_close_metrics, metrics, events)
        if metrics.wandb is not None:
            events.emit("note", text=f"wandb: {metrics.wandb.place}")
    window = config.monitor.profile_steps if is_rank_zero or config.monitor.profile_ranks == "all" else None
    profiler = StepProfiler(
        window if training else None,
        directory.profile / "sft" if phase == "sft" else directory.profile,
        parallel.rank(),
    )
    closing.callback(profiler.close)
    kernels = AttentionKernels.of(config, actor.spec)
    return ActorSession(
        config, directory, phase, start, actor, checkpoints, events, metrics, profiler, closing, kernels, weights
    )


def _close_metrics(metrics: MetricsLog, events: EventLog) -> None:
    if rows := metrics.close():
        events.emit("note", text=f"{rows} rows of metrics are not stored: the disk refused them")
