"""What the training loop stands on: the actor, the services, the crash state, and the records of a run.

One object a rank. The controller (rank 0) also holds the rollout service, the reward and the weight sync; on other
ranks the methods that need them return empty lists, so that `train.py` reads the same on every rank.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, NoReturn, TypeVar

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor, Scores
from arpo_megatron.actor.checkpoint import CheckpointStore
from arpo_megatron.actor.optimizer import optimizer_name
from arpo_megatron.actor.update_stats import UpdateStats
from arpo_megatron.algorithms.base import TrainingProgress
from arpo_megatron.config import JobConfig
from arpo_megatron.engine.admin import FailedPush, WeightPushError
from arpo_megatron.errors import StoppedError, UserError
from arpo_megatron.hardware.placement import placement
from arpo_megatron.jobs.checkpoint_dirs import resume_from
from arpo_megatron.jobs.fingerprint import fingerprint
from arpo_megatron.jobs.inputs import model_path
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.metrics import MetricsLog
from arpo_megatron.monitor.profiler import StepProfiler, peak_memory_gb
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.messages import StaleEnginesError
from arpo_megatron.rollout.record import UnfinishedTree, pack_trees, unpack_trees
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import TaskSelector
from arpo_megatron.trainer.batch import Batch, finish_credit
from arpo_megatron.trainer.consistency import check_push
from arpo_megatron.trainer.controller import Controller
from arpo_megatron.trainer.held_out import evaluation_due
from arpo_megatron.trainer.metrics import count_entropy, pack_metrics, sampling_gap, speed_metrics, update_metrics
from arpo_megatron.trainer.skipped_updates import SkippedUpdate, dump_if_skipped
from arpo_megatron.utils.atomic import write_json, written
from arpo_megatron.weights.export import export_hf, hf_buckets
from arpo_megatron.weights.sync import probe_gap

PUSH_ATTEMPTS, DISK_PUSH_ATTEMPTS = 3, 10
"""How often a weight push is tried: in general, and while only the disk between trainer and engines is at fault."""
LONGEST_PUSH_PAUSE_S = 60
TREES_FILE = "trees.msgpack"
"""In a checkpoint: the trees that are not trained yet (`rollout/record.py`)."""
REPLAY_FILE = "replay.msgpack"
"""Likewise what `algorithm.replay` keeps."""
T = TypeVar("T")


@dataclass(slots=True)
class RunState:
    """All that must survive a crash besides the actor's own checkpoint; saved with it.

    Attributes:
        step: finished steps; also the version of the policy.
        selector: position in the task order.
        totals: sums over all steps (forks, tool calls, tokens, mean entropies), by name.
        success: held-out success "before", after steps ("step_4") and "after", where measured, in [0, 1].
        logprob_gap_max: largest |trainer - engine| log-prob seen, in nats.
        skipped_in_a_row: updates skipped since the last one that was taken.
    """

    step: int = 0
    selector: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    success: dict[str, float] = field(default_factory=dict)
    logprob_gap_max: float = 0.0
    skipped_in_a_row: int = 0


@dataclass(slots=True)
class TrainingRun:
    """One rank's hold on a run."""

    config: JobConfig
    directory: RunDirectory
    actor: Actor
    tasks: Sequence[Task]
    selector: TaskSelector
    held_out: Sequence[Task]
    checkpoints: CheckpointStore
    events: EventLog
    metrics: MetricsLog | None
    controller: Controller | None
    profiler: StepProfiler
    state: RunState = field(default_factory=RunState)
    phases: dict[str, float] = field(default_factory=dict)
    entered: list[str] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step, less the phases inside of it, and show it in the progress display."""
        if name == "logprobs":
            self.profiler.before(self.state.step + 1)
        self.entered.append(name)
        self.events.emit("phase", name=name, step=self.state.step)
        started, others = time.monotonic(), sum(self.phases.values())
        try:
            yield
        finally:
            inside = sum(self.phases.values()) - others
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - started - inside
            self.entered.pop()
        if self.entered:
            self.events.emit("phase", name=self.entered[-1], step=self.state.step)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one; say which newer ones are damaged, and how."""
        self.events.emit("note", text=f"optimizer: {optimizer_name(self.actor.optimizer)}")
        found = self.checkpoints.resume_point()
        for line in found.told:
            self.events.emit("note", text=line)
        if (latest := found.path) is None:
            self._go_on_within([])
            return
        self.actor.load(CheckpointStore.actor_directory(latest))
        state = self.checkpoints.load_state(latest)
        if state.keys() != asdict(self.state).keys() or not (latest / TREES_FILE).exists():
            raise UserError(f"{latest} was written by another version of this program: go on with that one, or anew")
        self.state = RunState(**state)
        self.selector.load_state_dict(self.state.selector)
        self.events.emit("note", text=f"resumed from {latest.name}: {self.state.step} steps are done")
        self._go_on_within(unpack_trees((latest / TREES_FILE).read_bytes()))
        if (
            self.controller is not None
            and self.controller.collector.store is not None
            and (latest / REPLAY_FILE).exists()
        ):
            self.controller.collector.store.restore((latest / REPLAY_FILE).read_bytes())

    def _go_on_within(self, trees: list[UnfinishedTree]) -> None:
        """Take up the trees that a checkpoint holds, or what the step behind it had made of them when the run ended."""
        if self.controller is None:
            return
        collector = self.controller.collector
        if collector.journal is not None and (moment := collector.journal.read(self.state.step)) is not None:
            self.selector.load_state_dict(moment.selector)  # it is the controller's that draws tasks
            trees = moment.trees
            text = f"step {self.state.step + 1} goes on where it was: {len(trees)} trees with {moment.entries} entries"
            self.events.emit("note", text=text)
        collector.restore(trees, self.tasks)

    def stopping(self) -> bool:
        """Whether the job is asked to save and end; the same answer on all ranks."""
        return parallel.broadcast_object(self.controller is not None and self.directory.stop.exists())

    def stop(self) -> NoReturn:
        """Save what is not saved yet, and leave the training loop. Raises StoppedError on all ranks."""
        self.log_saves(wait=True)
        step = self.state.step
        if step and not parallel.broadcast_object((self.directory.checkpoints / f"step_{step}").exists()):
            self._save()
            self.log_saves(wait=True)
        self.events.emit("note", text=f"asked to end: {step} steps are done and saved")
        raise StoppedError

    def rollout(self) -> list[ScoredTree]:
        """The step's finished trees with a reward for every leaf; on the controller, elsewhere none.

        Raises StoppedError where the job is asked to end: what its trees have sampled is kept.
        """
        controller, step = self.controller, self.state.step
        scored = self._with_weights(None if controller is None else partial(controller.collector.step, step)) or []
        if placement(self.config).shared:
            with self.phase("lend"):
                if controller is not None:
                    controller.lend_memory()
        return scored

    def _with_weights(self, work: Callable[[], T] | None) -> T | None:
        """Return the result of `work` on rank 0; push the weights again, on all ranks, when an engine has lost them."""
        while True:
            result, outcome = None, "done"
            if work is not None:
                try:
                    result = work()
                except StaleEnginesError as engines:
                    self.events.emit("note", text=f"the weights are pushed again: {', '.join(engines.args)} lost them")
                    outcome = "stale"
                except StoppedError:
                    outcome = "stopped"
            # The others wait here, where the deadline is long.
            outcome = parallel.broadcast_object(outcome)
            if outcome == "stopped":
                self.stop()
            if outcome == "done":
                return result
            self.push_weights(self.state.step)

    def push_weights(self, version: int) -> None:
        """Hand the actor's weights to the engines as policy `version` and check with a probe that they arrived.

        A push that an engine's death interrupts is made again as soon as the engine is back. Attempts are 1, 2, 4, ...
        seconds apart: four minutes in all for a disk that is full.

        Raises:
            UserError: `PUSH_ATTEMPTS` in a row have failed, or `DISK_PUSH_ATTEMPTS` for a disk.
            RuntimeError: an engine's log-probs of the probe are further than `train.logprob_gap_limit` nats away.
        """
        for number in count():
            if self.stopping():  # a resumed run begins with a push
                return
            failed = parallel.broadcast_object(self._push_once(version))
            if failed is None:
                return
            if number + 1 >= (DISK_PUSH_ATTEMPTS if failed.disk else PUSH_ATTEMPTS):
                mend = "make room and " if failed.disk else ""
                text = f"{number + 1} weight pushes in a row have failed ({failed.why}): {mend}go on with --resume"
                raise UserError(text)
            pause_s = min(2**number, LONGEST_PUSH_PAUSE_S)
            self.events.emit("note", text=f"a weight push failed and is made again in {pause_s} s: {failed.why}")
            time.sleep(pause_s)  # on all ranks

    def _push_once(self, version: int) -> FailedPush | None:
        """One attempt of `push_weights`; what went wrong at the engines, if anything did."""
        buffers = self.controller.sync.buffers if self.controller else 0
        fused, size = self.config.engine.quantization != "none", self.config.sync.bucket_bytes
        buckets = hf_buckets(self.actor.chunks, self.actor.spec, size, buffers, fused=fused)
        probe, scores, error = None, None, None
        try:
            if self.controller is not None:
                probe, scores = self.controller.push(buckets, version)
        except WeightPushError as failed:
            error = FailedPush.of(failed)
        for _ in buckets:  # every rank takes part in gathering the shards, whatever becomes of them
            pass
        if (probe := parallel.broadcast_object(probe)) is None:
            return error
        # While the engines do the same; they score a prompt at temperature 1.
        logprobs = self.actor.logprobs([probe], temperature=1.0, training=False)[0]
        if self.controller is not None and scores is not None:
            try:
                gap = max(probe_gap(logprobs, engine) for engine in scores())
            except WeightPushError as failed:
                return FailedPush.of(failed)
            self.state.logprob_gap_max = max(self.state.logprob_gap_max, gap)
            check_push(gap, version, self.config)
            self.controller.collector.after_push(version)
        return None

    def update(self, minibatch: Batch, old: Scores, *, on_policy: bool) -> UpdateStats:
        """One optimizer update; one that is skipped because something is not finite is dumped for replay and counted.

        Args:
            minibatch: from `broadcast_batches` and `add_reference_logprobs` of minibatch.py.
            old: its packs under the policy of the step.
            on_policy: the present policy still is that one.

        Raises:
            UserError: it was the third in a row that was skipped.
        """
        if self.controller is not None:
            self.controller.collector.keep()  # trees of later steps grow meanwhile
        with self.phase("ratios"):  # with a `BatchLoss` a pass over the packs, which is no part of an update
            ready = finish_credit(
                self.actor, minibatch, old.logprobs, self.config, on_policy=on_policy, entropies=old.entropies
            )
        self.actor.progress = self._course()
        stats = self.actor.update(
            ready.packs, ready.old_logprobs, ready.loss, reference_logprobs=minibatch.reference_logprobs
        )
        bad = SkippedUpdate(
            phase="train",
            step=self.state.step,
            loss=ready.loss,
            suspects=self.actor.nonfinite_packs,
            packs=ready.packs,
            old_logprobs=ready.old_logprobs,
            reference_logprobs=minibatch.reference_logprobs,
            made_by=fingerprint(self.config, self.actor.spec),
        )
        self.state.skipped_in_a_row = dump_if_skipped(
            bad if stats.skipped else None,
            self.state.skipped_in_a_row,
            self.directory.skipped_updates,
            self.events,
            broadcast=parallel.broadcast_object,
        )
        return replace(stats, **ready.statistics)

    def _course(self) -> TrainingProgress:
        totals = self.state.totals
        entropy = totals["entropy"] / totals["entropy_steps"] if totals.get("entropy_steps") else None
        return TrainingProgress(self.state.step, self.config.train.steps, entropy)

    def finish_step(
        self,
        scored: Sequence[ScoredTree],
        minibatches: Sequence[Batch],
        old_scores: Sequence[Scores],
        updates: Sequence[UpdateStats],
    ) -> None:
        """Count the step as done, record it, and save what must survive.

        The record comes first: a step whose checkpoint was not reached is done again, and its record replaced.
        """
        version = self.state.step
        self.state.step += 1
        gap = sampling_gap(minibatches, [old.logprobs for old in old_scores], version=version)
        if gap is not None and math.isfinite(gap):  # if not finite, its update was skipped, which is told
            self.state.logprob_gap_max = max(self.state.logprob_gap_max, gap)
        count_entropy(self.state.totals, updates)
        seconds, self.phases = self.phases, {}
        memory = parallel.gather_objects(peak_memory_gb())
        if self.controller is not None and self.metrics is not None:
            self.controller.count(self.state.totals)
            missing = self._store(scored, self.controller)
            before = self.state.success.get(evaluation_due(self.config, version) or "")
            row = {
                "step": self.state.step,
                **self.controller.step_metrics(scored, version),
                "logprob_gap": gap,
                **pack_metrics(minibatches, self.actor.spec, self.config),
                **update_metrics(updates),
                **speed_metrics(minibatches, self.actor.spec, self.config, seconds),
                "memory_peak_gb": max(memory),
                "trees_not_stored": missing,
                **({} if before is None else {"held_out_success": before}),
                **{f"seconds/{name}": round(value, 3) for name, value in seconds.items()},
            }
            self.metrics.log(row)
            self.events.emit("step", steps=self.config.train.steps, **row)
            self.controller.collector.done()
        if (trace := self.profiler.after(self.state.step)) is not None:
            self.events.emit("note", text=f"profile: {trace}")
        self.log_saves()
        if self.state.step < self.config.train.steps:
            self.evaluate()  # before the save, so that a resumed run has it; the last one is after the loop
        if self.state.step == self.config.train.steps or self.state.step % self.config.train.save_every == 0:
            with self.phase("save"):  # its seconds are part of the next step's record
                self._save()
        if self.stopping():
            self.stop()

    def _save(self) -> None:
        files: dict[str, Callable[[], bytes]] = {TREES_FILE: partial(pack_trees, [])}
        if self.controller is not None:  # it alone draws tasks, and its files are the ones that are kept
            self.state.selector = self.selector.state_dict()  # the same moment as `unfinished`, also within a step
            files[TREES_FILE] = partial(pack_trees, self.controller.collector.unfinished())
            if (experience := self.controller.collector.snapshot()) is not None:
                files[REPLAY_FILE] = experience
        self.checkpoints.save(self.state.step, self.actor, asdict(self.state), files)

    def _store(self, scored: Sequence[ScoredTree], controller: Controller) -> int:
        """Write the step's trees to the run directory; counts and returns how many in all a full disk keeps out."""
        more = controller.tree_log.store(self.state.step, [*scored, *controller.collector.left_out], controller.decode)
        missing = int(self.state.totals.get("trees_not_stored", 0)) + more
        self.state.totals["trees_not_stored"] = missing
        return missing

    def log_saves(self, *, wait: bool = False) -> None:
        """Say which saves have failed since the last call; `wait` for the one under way."""
        if wait:
            self.checkpoints.finish()
        for saved in self.checkpoints.reports():
            if saved.error:
                self.events.emit("note", text=str(saved))

    def evaluate(self) -> None:
        """Held-out success of the present weights through engine and tools, where it is due and not measured yet."""
        step = self.state.step
        when = evaluation_due(self.config, step)
        if when is None or when in self.state.success:
            return
        self.events.emit("phase", name=f"evaluate {when}", step=step)
        controller, tasks = self.controller, self.held_out[: self.config.evaluation.tasks]
        figures = self._with_weights(None if controller is None else partial(controller.evaluate, tasks, step))
        if figures is not None:
            figures.write(self.directory.held_out, step, self.state.totals)
            self.state.success[when] = figures.success
            self.events.emit("evaluation", when=when, success=figures.success)
        self.state.success = parallel.broadcast_object(self.state.success)

    def export(self) -> None:
        """Write the Hugging Face directory, then the run's result."""
        self.log_saves(wait=True)
        self.events.emit("phase", name="export", step=self.state.step)
        source, otherwise = model_path(self.config, self.directory), resume_from(self.directory.checkpoints)
        with written(self.directory.export, otherwise):
            export_hf(self.actor.chunks, self.actor.spec, source, self.directory.export)
        if self.controller is not None:
            with written(self.directory.result, otherwise):
                write_json(self.directory.result, asdict(self.state))
            self.directory.step_journal.unlink(missing_ok=True)
