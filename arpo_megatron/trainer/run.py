"""One rank of an ARPO run: what `train.py` calls in each step.

Rank 0 also has a `Controller`. Methods that need it return empty lists on other ranks, so `train.py` reads the same on
every rank.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeVar

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor, PolicyOutputs
from arpo_megatron.actor.checkpoint import CheckpointStore
from arpo_megatron.actor.te_layers import number_format
from arpo_megatron.actor.update_stats import UpdateStats
from arpo_megatron.algorithms.base import TrainingProgress
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import StoppedError
from arpo_megatron.hardware.placement import placement
from arpo_megatron.jobs.checkpoint_dirs import disk_full_hint
from arpo_megatron.jobs.inputs import load_data, load_tokenizer
from arpo_megatron.jobs.prompts import with_tool_prompts
from arpo_megatron.monitor.profiler import peak_memory_gb
from arpo_megatron.monitor.samples import sample_leaves
from arpo_megatron.packing.balance import CostModel
from arpo_megatron.packing.packs import rank_costs
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.endpoints import ServiceEndpoints
from arpo_megatron.rollout.messages import StaleEnginesError
from arpo_megatron.tasks.base import Task
from arpo_megatron.trainer.batch import (
    Batch,
    add_reference_logprobs,
    broadcast_batches,
    build_batches,
    counterfactual_advantages,
    finish_credit,
    step_outputs,
    trained_trees,
)
from arpo_megatron.trainer.consistency import check_on_policy
from arpo_megatron.trainer.controller import Controller, ControllerState
from arpo_megatron.trainer.export_files import export_files
from arpo_megatron.trainer.held_out import evaluation_due
from arpo_megatron.trainer.metrics import count_entropy, pack_metrics, sampling_gap, speed_metrics, update_metrics
from arpo_megatron.trainer.push import connect_engines, push_with_retries
from arpo_megatron.trainer.setup import ActorSession
from arpo_megatron.trainer.stragglers import RankTimes, Stragglers, own_node
from arpo_megatron.utils.atomic import explain_disk_errors, write_json
from arpo_megatron.utils.code_version import code_version
from arpo_megatron.weights.export import export_hf
from arpo_megatron.weights.sync import WeightSync

T = TypeVar("T")


@dataclass(slots=True)
class RunState:
    """State of a run that a checkpoint keeps as state.json, besides the actor's and the controller's files."""

    step: int = 0
    """Finished steps; also the version of the policy."""
    selector: dict[str, Any] = field(default_factory=dict)
    """State of the task selector, on rank 0 (`ControllerState.selector`)."""
    totals: dict[str, float] = field(default_factory=dict)
    """Sums over all steps by name: forks, tool calls, tokens, mean entropies."""
    success: dict[str, float] = field(default_factory=dict)
    """Held-out success in [0, 1] by evaluation: "before", "step_4", ..., "after"."""
    logprob_gap_first: float | None = None
    """|trainer - engine| of the first push's probe, in nats: the rounding of this model."""
    logprob_gap_max: float = 0.0
    """Largest |trainer - engine| log-prob so far, in nats."""
    arpo_chances: list[float | None] = field(default_factory=list)
    """Mean chance of ARPO at the fork points of each finished step, if `algorithm.branching=random` follows it."""
    skipped_in_a_row: int = 0
    """Updates skipped since the last one that was taken."""


@dataclass(slots=True)
class TrainingRun:
    """One rank of a run between its set-up and its export."""

    session: ActorSession
    sync: WeightSync
    controller: Controller | None
    """The controller on rank 0; None on other ranks."""
    held_out: Sequence[Task]
    state: RunState = field(default_factory=RunState)
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase in the present step."""
    phases: list[str] = field(default_factory=list)
    """Phases that have begun and not ended, the outermost first."""
    stragglers: Stragglers = field(init=False)
    """Times of all ranks from step to step, on rank 0."""

    def __post_init__(self) -> None:
        self.stragglers = Stragglers(self.session.directory.rank_times)

    @classmethod
    def start(cls, session: ActorSession) -> Self:
        """Connect rank 0 to the services of the job, and resume the run from its newest checkpoint."""
        tokenizer = load_tokenizer(session.start)
        data = load_data(session.config, tokenizer)
        train, held_out = (
            with_tool_prompts(tasks, session.config, session.directory, tokenizer, session.config.rollout.system_prompt)
            for tasks in (data.train, data.held_out)
        )
        services, controller = ServiceEndpoints.from_environment(), None
        sync = connect_engines(session, services)
        if parallel.is_rank_zero():
            controller = Controller.start(session, sync, train, tokenizer, services)
        run = cls(session, sync, controller, held_out)
        run.resume()
        return run

    @property
    def config(self) -> JobConfig:
        """Config of the job, the same on every rank."""
        return self.session.config

    @property
    def actor(self) -> Actor:
        """The policy in training, this rank's part of it."""
        return self.session.actor

    @property
    def step(self) -> int:
        """Number of finished steps, which is also the number of the step in progress."""
        return self.state.step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step, without the phases inside it, and show it in the progress display."""
        if name == "logprobs":
            self.session.profiler.before(self.step + 1)
        self.phases.append(name)
        self.session.events.emit("phase", name=name, step=self.step)
        started, others = time.monotonic(), sum(self.seconds.values())
        try:
            yield
        finally:
            inside = sum(self.seconds.values()) - others
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started - inside
            self.phases.pop()
        if self.phases:
            self.session.events.emit("phase", name=self.phases[-1], step=self.step)

    def resume(self) -> None:
        """Continue from the newest whole checkpoint, and within the step after it if its journal was written."""
        checkpoint, saved = self.session.load_newest(), None
        if checkpoint is not None:
            self.state = RunState(**CheckpointStore.load_state(checkpoint))
            saved = ControllerState.load(checkpoint, self.state.selector)
            self.session.note(f"resumed from {checkpoint.name}: {self.step} steps are done", resumed=True)
        if self.controller is not None:
            self.controller.restore(saved, self.step, self.state.arpo_chances)

    def rollout(self) -> list[ScoredTree]:
        """Return the step's finished trees with a reward for every leaf; [] on other ranks than 0.

        Raises:
            StoppedError: the job is asked to end; the trees' samples are saved.
        """
        controller = self.controller
        work = None if controller is None else partial(controller.collector.collect, self.step)
        trees = self._retry_with_pushes(work) or []
        if placement(self.config).colocated:
            with self.phase("lend"):
                if controller is not None:
                    controller.lend_memory()
        return trees

    def make_batches(self, trees: Sequence[ScoredTree]) -> list[Batch]:
        """Turn rank 0's trees into the batches of the step's updates, on every rank."""
        prepare = self.session.prepare_kernels
        masked = None if self.controller is None else self.controller.masked_result
        estimates = counterfactual_advantages(self.actor, trees, self.config, masked, prepare)
        batches = broadcast_batches(build_batches(trees, self.config, self.actor.spec, estimates))
        prepare(pack for batch in batches for pack in batch.packs)
        return add_reference_logprobs(self.actor, batches)

    def compute_logprobs(self, batches: Sequence[Batch]) -> list[PolicyOutputs]:
        """Return log-probs and entropies of the batches under the present policy."""
        return step_outputs(self.actor, batches, self.config)

    def update(self, batch: Batch, old: PolicyOutputs, *, on_policy: bool, last: bool) -> UpdateStats:
        """Update the policy once; an update with a loss or gradient that is not finite is skipped and dumped.

        Args:
            batch: from `make_batches`.
            old: its log-probs and entropies under the policy of the step.
            on_policy: no update of the step came before, so the policy is checked against its old log-probs.
            last: no update of the step follows.

        Raises:
            RuntimeError: the policy differs from itself before its update.
            UserError: too many updates in a row were skipped.
        """
        if self.controller is not None:
            self.controller.collector.write_journal()  # trees of later steps grow meanwhile
        with self.phase("ratios"):  # a `BatchLoss` needs another pass over the packs, which is timed separately
            ready = finish_credit(
                self.actor,
                batch,
                old.logprobs,
                self.config,
                on_policy=on_policy,
                entropies=old.entropies,
                tempered_logprobs=old.tempered_logprobs,
            )
        self.actor.progress = self.progress()

        def check(stats: UpdateStats) -> None:
            check_on_policy(replace(stats, **ready.statistics), exact=parallel.device().type == "cpu")

        stats = self.actor.update(
            ready.packs,
            ready.old_logprobs,
            ready.loss,
            reference_logprobs=batch.reference_logprobs,
            check=check if on_policy else None,
            await_weights=last,
        )
        self.state.skipped_in_a_row = self.session.handle_skipped_update(
            self.state.skipped_in_a_row,
            skipped=stats.skipped,
            step=self.step,
            loss=ready.loss,
            packs=ready.packs,
            old_logprobs=ready.old_logprobs,
            reference_logprobs=batch.reference_logprobs,
        )
        return replace(stats, **ready.statistics)

    def progress(self) -> TrainingProgress:
        """Return the progress of the training, for losses that depend on it."""
        totals = self.state.totals
        entropy = totals["entropy"] / totals["entropy_steps"] if totals.get("entropy_steps") else None
        return TrainingProgress(self.step, self.config.train.steps, entropy)

    def push_weights(self, version: int) -> None:
        """Push the weights to the engines as policy `version`. Raises as `push_with_retries` does."""
        gap = push_with_retries(self.session, self.sync, self.controller, version, self.state.logprob_gap_first)
        if self.state.logprob_gap_first is None:
            self.state.logprob_gap_first = gap
        self.state.logprob_gap_max = max(self.state.logprob_gap_max, gap)

    def end_step(
        self,
        trees: Sequence[ScoredTree],
        batches: Sequence[Batch],
        old_outputs: Sequence[PolicyOutputs],
        updates: Sequence[UpdateStats],
    ) -> None:
        """Count the step as done and log its metrics.

        They are logged before the save: a step whose checkpoint was not reached is repeated, and its metrics are
        replaced.
        """
        session, config = self.session, self.config
        evaluated = evaluation_due(config, self.step)
        logprobs, keeps_kv = [old.logprobs for old in old_outputs], config.rollout.across_push == "keep_kv"
        gap = sampling_gap(batches, logprobs, version=self.step, old_kv=False if keeps_kv else None)
        kept = {"logprob_gap_old_kv": sampling_gap(batches, logprobs, version=self.step, old_kv=True)}
        if gap is not None and math.isfinite(gap):  # otherwise the update was skipped, which is logged
            self.state.logprob_gap_max = max(self.state.logprob_gap_max, gap)
        self.state.step += 1
        count_entropy(self.state.totals, updates)
        seconds, self.seconds = self.seconds, {}
        own = RankTimes(own_node(), parallel.data_rank(), seconds, self.actor.clock.take(), peak_memory_gb())
        times = parallel.gather_objects(own)
        if self.controller is not None and session.metrics is not None:
            slowness, slow = self._stragglers(times, batches)
            row = {
                "step": self.step,
                **self.controller.finish_step(trees, trained_trees(batches, old_outputs), self.state.totals),
                "logprob_gap": gap,
                **(kept if keeps_kv else {}),
                **pack_metrics(batches, self.actor.spec, config),
                "attention_kernels": len(session.kernels.needed),
                **update_metrics(updates),
                **speed_metrics(batches, self.actor.spec, config, seconds),
                "memory_peak_gb": max(rank.memory_gb for rank in times),
                "slowest_rank": slowness,
                "number_format": number_format(config.model),
                **({"held_out_success": self.state.success[evaluated]} if evaluated in self.state.success else {}),
                **{f"seconds/{name}": round(value, 3) for name, value in seconds.items()},
            }
            session.metrics.log(row)
            if session.metrics.wandb is not None and self._save_due():
                leaves = sample_leaves(trees, self.controller.decode, self.step, config.monitor.wandb_samples)
                session.metrics.wandb.log_samples(self.step, leaves)
            session.events.emit("step", steps=config.train.steps, **row)
            if slow:
                session.note(slow)
        session.end_profile(self.step)
        session.log_saves()

    def save_if_due(self) -> None:
        """Start to write a checkpoint, and the weights alone, if this step is due."""
        if self._save_due():
            with self.phase("save"):  # its seconds count for the next step
                self.save()
        self.session.save_weights(self.step)

    def stop_if_asked(self) -> None:
        """Save and raise StoppedError if the job is asked to end."""
        if self.session.stopping():
            self.session.stop(self.step, self.save)

    def _stragglers(self, times: Sequence[RankTimes], batches: Sequence[Batch]) -> tuple[float | None, str]:
        cost, ranks = CostModel.of(self.actor.spec), self.config.parallel.data
        packs = [pack for batch in batches for pack in batch.packs]
        return self.stragglers.add(self.step, times, rank_costs(packs, ranks, cost))

    def _save_due(self) -> bool:
        train = self.config.train
        return self.step == train.steps or self.step % train.save_every == 0

    def save(self) -> None:
        """Start to write a checkpoint of the policy and, on rank 0, of the controller."""
        files: dict[str, Callable[[], bytes]] = {}
        if self.controller is not None:
            snapshot = self.controller.snapshot()
            self.state.selector, files = snapshot.selector, snapshot.files()
        self.session.save(self.step, asdict(self.state), files)

    def evaluate(self) -> None:
        """Measure held-out success if an evaluation is due and not done yet."""
        when = evaluation_due(self.config, self.step)
        if when is None or when in self.state.success:
            return
        self.session.events.emit("phase", name=f"evaluate {when}", step=self.step)
        controller, tasks = self.controller, self.held_out[: self.config.evaluation.tasks]
        result = self._retry_with_pushes(None if controller is None else partial(controller.evaluate, tasks, self.step))
        if result is not None:
            result.write(self.session.directory.held_out, self.step, self.state.totals)
            self.state.success[when] = result.success
            self.session.events.emit("evaluation", when=when, success=result.success)
        self.state.success = parallel.broadcast_object(self.state.success)

    def export(self) -> None:
        """Write the trained model as a Hugging Face directory, then the run's result."""
        session, directory = self.session, self.session.directory
        session.log_saves(wait=True)
        session.events.emit("phase", name="export", step=self.step)
        hint = disk_full_hint(directory.checkpoints)
        with explain_disk_errors(directory.export, hint):
            files = export_files(self.config, directory, session.start, self.step, code_version())
            export_hf(self.actor.chunks, self.actor.spec, session.start, directory.export, files=files)
        if self.controller is not None:
            with explain_disk_errors(directory.result, hint):
                result = asdict(self.state)
                del result["selector"]  # the order of the tasks is no result
                write_json(directory.result, result)
            directory.step_journal.unlink(missing_ok=True)
            if session.metrics is not None and session.metrics.wandb is not None:
                session.metrics.wandb.log_export(directory.export)

    def _retry_with_pushes(self, work: Callable[[], T] | None) -> T | None:
        """Return the result of rank 0's `work`; whenever an engine has lost its weights, all ranks push them again."""
        while True:
            result, outcome = None, "done"
            if work is not None:
                try:
                    result = work()
                except StaleEnginesError as engines:
                    self.session.note(f"the weights are pushed again: {', '.join(engines.args)} lost them")
                    outcome = "stale"
                except StoppedError:
                    outcome = "stopped"
            # The other ranks wait here: this collective has a long deadline.
            outcome = parallel.broadcast_object(outcome)
            if outcome == "stopped":
                self.session.stop(self.step, self.save)
            if outcome == "done":
                return result
            self.push_weights(self.step)
