"""Collection of the trees that a step trains.

With `rollout.max_staleness=0` a step starts its tasks and waits for all of them, except those that
`rollout.oversampling` started in addition: it gives these up once it has enough trees. Otherwise twice as many trees
are in flight, also while the trainer trains. They continue across weight pushes, so a slow tool delays only its own
tree. A tree that began with version v is trained by step v + max_staleness (from 0) at the latest: the step waits for
it, or (`rollout.stale=drop`) continues without it and drops it when it finishes.

Every tree left out is counted by reason and stored with it. New tasks replace failed trees, stale trees
and groups without signal, in at most `rollout.max_refills` rounds per step; then the step continues with fewer trees.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from arpo_megatron.algorithms.branching.random_forks import at_rate, rate_of_step
from arpo_megatron.algorithms.replay.base import AddsTrees, ReplayBuffer
from arpo_megatron.config import JobConfig, RolloutConfig
from arpo_megatron.errors import StoppedError, UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.accounting import RolloutStats
from arpo_megatron.rollout.handle import RolloutHandle
from arpo_megatron.rollout.messages import (
    CollectTrees,
    FailedTree,
    FinishTrees,
    RolloutProgress,
    RolloutReport,
    RolloutSettings,
    StaleEnginesError,
    StopTrees,
)
from arpo_megatron.rollout.record import UntrainedTree
from arpo_megatron.tasks.base import Task, VariesTasks
from arpo_megatron.tasks.selectors.base import TaskSelector
from arpo_megatron.trainer.scorer import TreeScorer
from arpo_megatron.trainer.step_journal import StepJournal
from arpo_megatron.tree import Role, RolloutTree

TRAINING = "training"
"""Purpose of the trees that steps train."""
DROPS = ("failed", "no_signal", "stale", "oversampled")
"""Reasons not to train a tree:

- failed: it could not be finished.
- no_signal: all its answers are equally correct (`algorithm.drop_groups_without_signal`).
- stale: a part of it is older than `rollout.max_staleness` allows (`rollout.stale=drop`).
- oversampled: the step had enough trees (`rollout.oversampling`).
"""
DROP_FIXES = {
    "no_signal": "raise rollout.max_refills, choose tasks by difficulty (algorithm.selector), or set "
    "algorithm.drop_groups_without_signal=false",
    "stale": "raise rollout.max_staleness or set rollout.stale=wait",
}
"""Changes that give a step its trees again, by the reason why it has none."""


@dataclass(slots=True)
class StepInProgress:
    """All that belongs to one step, from its first tree to `TreeCollector.end_step`."""

    step: int
    """Number of the step that trains the trees, from 0; also the policy version that the step begins with."""
    replay_before: Callable[[], bytes] | None = None
    """Snapshot of the replay buffer before the step; None without a buffer."""
    drawn: set[str] = field(default_factory=set)
    """Ids of the tasks that were started for the step."""
    refills: int = 0
    """How often tasks were started to replace trees that were left out."""
    kept: list[ScoredTree] = field(default_factory=list)
    """Trees that the step will train."""
    scored: list[ScoredTree] = field(default_factory=list)
    """Finished trees that the selector has not recorded yet; it records them when the step is complete."""
    left_out: list[ScoredTree] = field(default_factory=list)
    """Trees that the step does not train; `dropped` counts them by reason."""
    failure: str = ""
    """Why the newest failed tree failed."""
    stats: list[RolloutStats] = field(default_factory=list)
    """Cost of each collection."""
    selector_before: dict[str, Any] | None = None
    """State of the selector before it recorded the step's trees; None until the step is complete."""
    pushed: bool = False
    """The engines have the next policy, so the journal of this step records nothing more."""

    @property
    def dropped(self) -> Counter[str]:
        """Number of trees left out, by reason."""
        return Counter(item.dropped for item in self.left_out if item.dropped is not None)


@dataclass(slots=True)
class TreeCollector:
    """Starts trees ahead of need, collects finished ones, and scores, filters and replaces them."""

    config: JobConfig
    rollouts: RolloutHandle
    scorer: TreeScorer
    selector: TaskSelector
    journal: StepJournal
    events: EventLog
    replay: ReplayBuffer | None = None
    """Mixes stored trajectories into the step's trees."""
    current: StepInProgress | None = None
    in_flight: list[Task] = field(default_factory=list)
    """Tasks of the trees in flight, in the order of their start."""
    restored: list[tuple[Task, UntrainedTree]] = field(default_factory=list)
    """Trees that a stopped run had in flight; the next step continues them."""
    paused: bool = False
    """No tree grows until the next push has succeeded."""
    arpo_chances: list[float | None] = field(default_factory=list)
    """`arpo_chance` of each finished step, which a random control arm follows (`RunState.arpo_chances`)."""

    def collect(self, step: int) -> list[ScoredTree]:
        """Return the trees that step `step` (from 0) trains.

        Raises:
            StaleEnginesError: engines need a push; a second call continues the step.
            StoppedError: the job is asked to end; `unfinished` has the step's trees.
            UserError: a tool is blocked (`check_not_blocked`), or no tree is fit for training after all refills,
                although none failed.
            RuntimeError: no tree is fit for training after all refills, and some failed.
        """
        current = self.current if self.current is not None and self.current.step == step else self._begin(step)
        current.selector_before = None
        try:
            self._wait_for_step(current)
        finally:
            self.write_journal(now=True)
        current.selector_before = self.selector.state_dict()
        return self._end_collection(current)

    def end_step(self) -> StepInProgress:
        """End the step, which is trained, and return it. A job that ends from now on does not need its trees again."""
        if self.current is None:
            raise RuntimeError("no step is in progress")
        self.rollouts.discard_collected(TRAINING)
        self.scorer.forget(self.current.step + 1)
        finished, self.current = self.current, None
        return finished

    def write_journal(self, *, now: bool = False) -> None:
        """Journal the trees in flight if it is time, or `now`; to be called while the trainer trains, too.

        Nothing is written between the push of the next policy and `end_step`: a run that resumes within the step does
        not have the weights that sampled then.
        """
        current = self.current
        if current is None or current.pushed or self.paused:
            return
        selector = self.selector.state_dict() if current.selector_before is None else current.selector_before
        self.journal.write(current.step, selector, self.unfinished, now=now)

    def before_push(self) -> None:
        """Pause the trees in flight or, with `rollout.across_push=drain`, finish them."""
        if self.paused:  # by an attempt that failed
            return
        if self.in_flight and self.config.rollout.across_push == "drain":
            with suppress(StaleEnginesError):  # the push that follows is the one that the engines need
                self.rollouts.finish_trees(FinishTrees(TRAINING), partial(report_progress, self.events))
        self.rollouts.pause()
        self.write_journal()
        self.paused = True

    def after_push(self, version: int) -> None:
        """Let the trees continue with policy `version`."""
        self.paused = False
        if self.current is not None and version != self.current.step:
            self.current.pushed = True
        self.rollouts.resume(version)

    def unfinished(self) -> list[UntrainedTree]:
        """Return all trees that were started and not trained, with all that they have sampled.

        The finished trees of a step in progress are among them: a run that resumes within the step scores, filters and
        counts them again.
        """
        return [*(tree for _, tree in self.restored), *self.rollouts.unfinished_trees(TRAINING)]

    def restore(self, trees: Sequence[UntrainedTree], tasks: Sequence[Task]) -> None:
        """Continue `trees`, which `unfinished` returned, in the next step."""
        by_id = {task.id: task for task in tasks}
        for tree in trees:
            if tree.task_id not in by_id and isinstance(self.selector, VariesTasks):
                by_id[tree.task_id] = self.selector.variant(tree.task_id)
        self.restored = [(by_id[tree.task_id], tree) for tree in trees]

    def replay_snapshot(self) -> Callable[[], bytes] | None:
        """Return the replay buffer that matches `unfinished`."""
        if self.replay is None:
            return None
        return self.replay.snapshot() if self.current is None else self.current.replay_before

    def _begin(self, step: int) -> StepInProgress:
        current = StepInProgress(step, None if self.replay is None else self.replay.snapshot())
        self.current = current
        self._resume_restored(current)
        self._start(self.config.trees_in_flight(step) - len(self.in_flight), current)
        return current

    def _resume_restored(self, current: StepInProgress) -> None:
        if not self.restored:
            return
        trees, self.restored = self.restored, []
        self.in_flight += [task for task, _ in trees]
        current.drawn.update(tree.task_id for _, tree in trees if tree.step == current.step)
        # A tree continues with the fork rate of its step.
        for rate, same in groupby(trees, key=lambda item: rate_of_step(self.arpo_chances, item[1].step)):
            self.rollouts.resume_trees(TRAINING, list(same), version=current.step, settings=self._settings(rate))

    def _settings(self, fork_rate: float | None) -> RolloutSettings:
        """Return the settings of trees with a fork rate that follows ARPO's; None: before it is known."""
        settings = RolloutSettings.training(self.config)
        return replace(settings, branching=at_rate(self.config.algorithm, fork_rate))

    def _start(self, count: int, current: StepInProgress) -> None:
        tasks = self.selector.next_batch(count, current.drawn) if count > 0 else []
        if not tasks:
            return
        current.drawn.update(task.id for task in tasks)
        self.in_flight += tasks
        settings = self._settings(rate_of_step(self.arpo_chances, current.step))
        self.rollouts.start_trees(TRAINING, tasks, step=current.step, version=current.step, settings=settings)

    def _wait_for_step(self, current: StepInProgress) -> None:
        """Wait for the step's trees, and replace those that are not fit for training."""
        wanted = self.config.train.tasks_per_step
        while (missing := wanted - len(current.kept)) > 0:
            current.kept += self._keep_trainable(self._wait_for_trees(missing, current), current)
            missing = wanted - len(current.kept)
            if missing > len(self.in_flight) and current.refills < self.config.rollout.max_refills:
                current.refills += 1
                self._start(missing - len(self.in_flight), current)
            if not self.in_flight:
                break

    def _wait_for_trees(self, count: int, current: StepInProgress) -> list[ScoredTree]:
        """Wait for about `count` more finished trees and score them."""
        request = collect_request(self.config.rollout, TRAINING, count, current.step)
        report = self.rollouts.collect(request, self._progressed, partial(self.scorer.begin, step=current.step))
        for each in report.failed:
            check_not_blocked(each)
            current.failure = each.reason
            self._log(f"the tree of {each.tree.task_id} was dropped: {each.reason}")
        for tool, reason in report.failed_calls.items():
            self._log(f"calls of {tool} failed and ended their branches; one of them: {reason}")
        scored = self._accept_report(report, current, failed_because="failed")
        current.scored += scored
        return scored

    def _progressed(self, progress: RolloutProgress) -> None:
        self.write_journal()
        report_progress(self.events, progress)

    def _accept_report(
        self, report: RolloutReport, current: StepInProgress, *, failed_because: str
    ) -> list[ScoredTree]:
        current.stats.append(report.stats)
        for each in report.failed:
            current.left_out.append(self._as_incomplete(each, failed_because))
        tasks = [self._remove_in_flight(tree.task_id) for tree in report.trees]
        return self.scorer.score(report.trees, tasks, step=current.step)

    def _as_incomplete(self, item: FailedTree, reason: str) -> ScoredTree:
        return ScoredTree.incomplete(self._remove_in_flight(item.tree.task_id), item.tree, reason)

    def _remove_in_flight(self, task_id: str) -> Task:
        """Remove a task from those in flight and return it."""
        index = next(i for i, task in enumerate(self.in_flight) if task.id == task_id)
        return self.in_flight.pop(index)

    def _keep_trainable(self, scored: Sequence[ScoredTree], current: StepInProgress) -> list[ScoredTree]:
        """Return the trees that the step may train, and leave out the others."""
        fit, rollout = [], self.config.rollout
        for sampled in scored:
            item = sampled
            if rollout.stale == "drop" and staleness(item.tree, current.step)[1] > rollout.max_staleness:
                current.left_out.append(replace(item, dropped="stale"))
                continue
            if self.replay is not None:
                item = self.replay.mix(item, current.step)
            if self.config.algorithm.drop_groups_without_signal and np.ptp(item.accuracies) == 0:
                current.left_out.append(replace(item, dropped="no_signal"))
            else:
                fit.append(item)
        return fit

    def _end_collection(self, current: StepInProgress) -> list[ScoredTree]:
        """End the collection; the selector records the step's trees."""
        if self.config.rollout.max_staleness == 0 and self.in_flight:
            # Before any tree is passed to the selector: a stop can arrive here, while the scorer waits for a judge.
            report = self.rollouts.stop_trees(StopTrees(TRAINING))
            spare = self._accept_report(report, current, failed_because="oversampled")
            current.left_out += [replace(item, dropped="oversampled") for item in spare]
        for item in current.scored:
            self.selector.record_result(item.task.id, item.accuracies.tolist())
        current.scored.clear()
        kept, wanted = current.kept, self.config.train.tasks_per_step
        if not kept:
            reasons = ", ".join(f"{count} {reason}" for reason, count in current.dropped.items())
            last = f"; the last failure: {current.failure}" if current.failure else ""
            nothing = f"step {current.step + 1} has no tree to train ({reasons}{last})"
            fixes = [fix for reason, fix in DROP_FIXES.items() if current.dropped[reason]]
            if fixes and not current.dropped["failed"]:
                raise UserError(f"{nothing}: {'; '.join(fixes)}")
            raise RuntimeError(nothing)
        if len(kept) < wanted:
            self._log(f"step {current.step + 1} trains {len(kept)} trees of {wanted}: {dict(current.dropped)}")
        if isinstance(self.replay, AddsTrees):
            return interleave(kept, self.replay.extra_trees(len(kept), current.step))
        return kept

    def _log(self, text: str) -> None:
        self.events.emit("note", text=text)


def check_not_blocked(failed: FailedTree) -> None:
    """Raise UserError if the tree failed because a tool is blocked. A resumed run makes its call again."""
    if failed.blocked:
        raise UserError(f"{failed.blocked} Fix that, then continue the run with --resume")


def collect_request(rollout: RolloutConfig, purpose: str, count: int, version: int) -> CollectTrees:
    """Return the request of step `version` (from 0): `count` trees, and those too old for the next step."""
    waits = rollout.max_staleness > 0 and rollout.stale == "wait"
    return CollectTrees(purpose, count=count, finish_before=version - rollout.max_staleness + 1 if waits else None)


def interleave(own: Sequence[ScoredTree], added: Sequence[ScoredTree]) -> list[ScoredTree]:
    """Return both lists in their order, evenly mixed, so that every batch of a step has its share of each."""
    positions = [((number + 0.5) / len(items), item) for items in (own, added) for number, item in enumerate(items)]
    return [item for _, item in sorted(positions, key=lambda each: each[0])]


def report_progress(events: EventLog, progress: RolloutProgress) -> None:
    """Log how far a collection is. Raises StoppedError if the job is asked to end."""
    text = f"{progress.trees_done} of {progress.trees_total} trees, {progress.tokens_sampled} tokens sampled"
    held = progress.admission
    if held.waiting:
        text += f"; {held.resident} paths of {held.trees_running} trees run, {held.waiting} paths wait for KV memory"
        text += f" ({held.trees_waiting} trees with all of their paths)"
    events.emit("progress", text=text)
    check_stop(events)


def check_stop(events: EventLog) -> None:
    """Raise StoppedError if the job is asked to end."""
    if RunDirectory(events.path.parent).stop.exists():
        raise StoppedError


def staleness(tree: RolloutTree, version: int) -> tuple[float, int]:
    """Return the age of the weights that sampled a tree, in versions before `version`.

    Returns:
        The mean over MODEL tokens, and the maximum.
    """
    model = [segment for segment in tree.segments if segment.role is Role.MODEL]
    ages = [version - segment.policy_version for segment in model]
    tokens = sum(len(segment) for segment in model)
    return sum(age * len(s) for age, s in zip(ages, model, strict=True)) / max(1, tokens), max(ages, default=0)
