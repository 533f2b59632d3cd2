"""Which trees a step trains: started ahead of need, collected when finished, scored, filtered, replaced.

With `rollout.max_staleness=0` a step starts its tasks and waits for all of them but those of `rollout.oversampling`,
which it gives up. Otherwise as many trees again are under way while the trainer trains; they go on across weight
pushes, so a slow tool delays nobody else. A tree that began with version v is trained by the update of version
v + max_staleness at the latest: the step waits for those that would be too late, or (`rollout.stale=drop`) goes on
without them and leaves them out when they finish.

Whatever is left out is counted by its reason and stored with it, and another task takes its place.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from arpo_megatron.algorithms.replay.base import AddsTrees, ReplayBuffer
from arpo_megatron.config import JobConfig, RolloutConfig
from arpo_megatron.errors import StoppedError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.accounting import RolloutStats
from arpo_megatron.rollout.handle import RolloutHandle
from arpo_megatron.rollout.messages import (
    CollectTrees,
    FinishTrees,
    RolloutProgress,
    RolloutSettings,
    StaleEnginesError,
    StopTrees,
)
from arpo_megatron.rollout.record import UnfinishedTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import TaskSelector
from arpo_megatron.trainer.step_journal import StepJournal
from arpo_megatron.tree import Role, RolloutTree

GROUP = "training"
DROPS = ("failed", "no_signal", "stale", "oversampled")
"""Reasons for which a tree is not trained: it could not be finished; all its trajectories earned the same
(`algorithm.drop_groups_without_signal`); a part of it is older than `rollout.max_staleness` allows
(`rollout.stale=drop`); the step had enough (`rollout.oversampling`)."""


@dataclass(slots=True)
class TreeCollector:
    """The controller's hold on the trees of training.

    Attributes:
        score: trees and the tasks they belong to -> scored trees, in the same order.
        growing: tasks of the trees under way, in the order of their start.
        restored: trees that a stopped run had under way, and their tasks; they go on with the next step.
        begun: the step that was begun last.
        drawn: ids of the tasks whose trees were begun in it.
        refills: of this step.
        at_rest: no tree grows until the next push has been made.
        kept: trees of this step, until it has enough.
        stats: what the trees of the last step cost.
        dropped: of the last step, by reason.
        left_out: those trees.
        scored: finished trees of a step that is not complete, of which the selector is told then.
        store: mixes old trajectories into trees; None: there is none.
        stored_before: its state before a step that is not done.
        journal: keeps what the step's trees have sampled so far; None: nobody does.
        open: a step is begun and not done.
        position: the selector's, before it heard of the trees that the step trains; None: the step has not all of them.
    """

    config: JobConfig
    rollouts: RolloutHandle
    score: Callable[[Sequence[RolloutTree], Sequence[Task]], list[ScoredTree]]
    selector: TaskSelector
    events: EventLog
    growing: list[Task] = field(default_factory=list)
    restored: list[tuple[Task, UnfinishedTree]] = field(default_factory=list)
    begun: int = -1
    drawn: set[str] = field(default_factory=set)
    refills: int = 0
    at_rest: bool = False
    kept: list[ScoredTree] = field(default_factory=list)
    stats: list[RolloutStats] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    left_out: list[ScoredTree] = field(default_factory=list)
    scored: list[ScoredTree] = field(default_factory=list)
    store: ReplayBuffer | None = None
    stored_before: Callable[[], bytes] | None = None
    journal: StepJournal | None = None
    open: bool = False
    position: dict[str, Any] | None = None

    def step(self, step: int) -> list[ScoredTree]:
        """The trees that update number `step` (from 0, the version of the policy too) trains.

        Raises:
            StaleEnginesError: engines need a push; a second call goes on where this one was.
            RuntimeError: after all refills not one tree is fit for training.
        """
        self.open, self.position = True, None
        if step != self.begun:
            self.begun, self.refills, self.stats, self.dropped, self.left_out = step, 0, [], Counter(), []
            self.stored_before = None if self.store is None else self.store.snapshot()
            self.drawn.clear()
            self._go_on(step)
            self._start(self.config.trees_in_flight(step) - len(self.growing), step)
        try:
            self._gather(step)
        finally:
            self.keep(now=True)
        self.position = self.selector.state_dict()  # a run that goes on here tells the selector of these trees
        return self._complete(step)

    def _gather(self, step: int) -> None:
        """Wait for the step's trees, and replace those that are not fit for training."""
        train, rollout = self.config.train, self.config.rollout
        while True:
            self.kept += self._fit(self._collect(train.tasks_per_step - len(self.kept), step), step)
            missing = train.tasks_per_step - len(self.kept)
            if missing <= 0:
                break
            if missing > len(self.growing) and self.refills < rollout.max_refills:
                self.refills += 1
                self._start(missing - len(self.growing), step)
            if not self.growing:
                break

    def _complete(self, step: int) -> list[ScoredTree]:
        """The step has what it trains."""
        if self.config.rollout.max_staleness == 0 and self.growing:
            self._give_up()  # before the selector hears of any tree: a judge that is waited for may be told to stop
        wanted = self.config.train.tasks_per_step
        kept, self.kept = self.kept, []
        for item in self.scored:
            self.selector.note(item.task.id, item.accuracies.tolist())
        self.scored.clear()
        if not kept:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            raise RuntimeError(f"step {step + 1} has not one tree to train; dropped: {reasons}")
        if len(kept) < wanted:
            self._tell(f"step {step + 1} trains {len(kept)} trees of {wanted}: {dict(self.dropped)}")
        return (
            kept
            if not isinstance(self.store, AddsTrees)
            else interleaved(kept, self.store.extra_trees(len(kept), step))
        )

    def keep(self, *, now: bool = False) -> None:
        """Write down where the step is, if it is time or must be `now`; to be called also while the trainer trains.

        The step's trees are under way until `done`, as those of later steps are. Nothing is written between a push and
        `done`: what newer weights went on with could not be trained by a run that goes on here.
        """
        if self.journal is not None and self.open and not self.at_rest:
            position = self.selector.state_dict() if self.position is None else self.position
            self.journal.keep(self.begun, position, self.unfinished, now=now)

    def before_push(self) -> None:
        """Bring the trees under way to where weights may change: at rest, or (`rollout.across_push=drain`) finished."""
        if self.at_rest:  # an attempt that failed has been here
            return
        if self.growing and self.config.rollout.across_push == "drain":
            with suppress(StaleEnginesError):  # what comes now is the push that they wait for
                self.rollouts.finish_trees(FinishTrees(GROUP), partial(show_progress, self.events))
        self.rollouts.pause()
        self.keep()
        self.at_rest = True

    def after_push(self, version: int) -> None:
        """Let the trees go on with the new policy."""
        self.at_rest = False
        self.open = self.open and version == self.begun  # a push within a step, or the one behind it
        self.rollouts.resume(version)

    def done(self) -> None:
        """The last step is trained: a job that ends from now on does not need its trees again."""
        self.rollouts.discard_collected(GROUP)
        self.open, self.stored_before = False, None

    def unfinished(self) -> list[UnfinishedTree]:
        """All trees that were begun, but those of steps that are `done`, with all they have sampled.

        Those that wait for their step, those that it has (also the ones that it left out): a job that is asked to end
        in the middle of a step goes on there, and scores, filters and counts the step's trees again.
        """
        return [*(tree for _, tree in self.restored), *self.rollouts.unfinished_trees(GROUP)]

    def restore(self, trees: Sequence[UnfinishedTree], tasks: Sequence[Task]) -> None:
        """Go on with what `unfinished` told, before anything else is started."""
        by_id = {task.id: task for task in tasks}
        self.restored = [(by_id[tree.task_id], tree) for tree in trees]

    def snapshot(self) -> Callable[[], bytes] | None:
        """What the store holds from the steps that are done, to go with `unfinished`; None: there is no store."""
        return self.stored_before if self.store is None or self.stored_before else self.store.snapshot()

    def _start(self, count: int, step: int) -> None:
        tasks = self.selector.next_batch(count, self.drawn) if count > 0 else []
        if not tasks:
            return
        self.drawn.update(task.id for task in tasks)
        self.growing += tasks
        settings = RolloutSettings.training(self.config)
        self.rollouts.start_trees(GROUP, tasks, step=step, version=step, settings=settings)

    def _go_on(self, step: int) -> None:
        if not self.restored:
            return
        trees, self.restored = self.restored, []
        self.growing += [task for task, _ in trees]
        self.drawn.update(tree.task_id for _, tree in trees if tree.step == step)
        self.rollouts.resume_trees(GROUP, trees, version=step, settings=RolloutSettings.training(self.config))

    def _give_up(self) -> None:
        """The step has enough trees."""
        report = self.rollouts.stop_trees(StopTrees(GROUP))
        self.stats.append(report.stats)
        scored = self.score(report.trees, [self._take(tree.task_id) for tree in report.trees])
        for item in scored:
            self._drop(item, "oversampled")
        for each in report.failed:
            task = self._take(each.tree.task_id)
            self._drop(ScoredTree.incomplete(task, each.tree, "oversampled"), "oversampled")

    def _drop(self, item: ScoredTree, reason: str) -> None:
        self.dropped[reason] += 1
        self.left_out.append(replace(item, dropped=reason))

    def _collect(self, count: int, step: int) -> list[ScoredTree]:
        """About `count` more finished trees, scored; those that failed are told and counted."""
        report = self.rollouts.collect(wanted_trees(self.config.rollout, GROUP, count, step), self._heard)
        self.stats.append(report.stats)
        for each in report.failed:
            task = self._take(each.tree.task_id)
            self._drop(ScoredTree.incomplete(task, each.tree, "failed"), "failed")
            self._tell(f"the tree of {task.id} was dropped: {each.reason}")
        scored = self.score(report.trees, [self._take(tree.task_id) for tree in report.trees])
        self.scored += scored
        return scored

    def _heard(self, progress: RolloutProgress) -> None:
        self.keep()
        show_progress(self.events, progress)

    def _take(self, task_id: str) -> Task:
        index = next(i for i, task in enumerate(self.growing) if task.id == task_id)
        return self.growing.pop(index)

    def _fit(self, scored: Sequence[ScoredTree], step: int) -> list[ScoredTree]:
        """Those that a step may train."""
        fit, rollout = [], self.config.rollout
        for sampled in scored:
            item = sampled
            if rollout.stale == "drop" and staleness(item.tree, step)[1] > rollout.max_staleness:
                self._drop(item, "stale")
                continue
            if self.store is not None:
                item = self.store.mix(item, step)
            if self.config.algorithm.drop_groups_without_signal and np.ptp(item.rewards) == 0:
                self._drop(item, "no_signal")
            else:
                fit.append(item)
        return fit

    def _tell(self, text: str) -> None:
        self.events.emit("note", text=text)

    def metrics(self) -> dict[str, Any]:
        """What was dropped in the last step, by reason."""
        return {f"dropped/{reason}": self.dropped[reason] for reason in DROPS}


def wanted_trees(rollout: RolloutConfig, group: str, count: int, version: int) -> CollectTrees:
    """What an update of policy `version` waits for: `count` trees, and those that would be too old for the next one."""
    waits = rollout.max_staleness > 0 and rollout.stale == "wait"
    return CollectTrees(group, count=count, finish_before=version - rollout.max_staleness + 1 if waits else None)


def interleaved(own: Sequence[ScoredTree], added: Sequence[ScoredTree]) -> list[ScoredTree]:
    """Both in their order, evenly mixed, so that every minibatch of a step has its share of either."""
    places = [((number + 0.5) / len(items), item) for items in (own, added) for number, item in enumerate(items)]
    return [item for _, item in sorted(places, key=lambda each: each[0])]


def show_progress(events: EventLog, progress: RolloutProgress) -> None:
    """Tell how far a collection has come. Raises StoppedError where the job is asked to end."""
    text = f"{progress.trees_done} of {progress.trees_total} trees, {progress.tokens_sampled} tokens sampled"
    events.emit("progress", text=text)
    check_stop(events)


def check_stop(events: EventLog) -> None:
    """Raises StoppedError where the job is asked to end."""
    if RunDirectory(events.path.parent).stop.exists():
        raise StoppedError


def staleness(tree: RolloutTree, version: int) -> tuple[float, int]:
    """How many versions older than `version` the weights were that sampled it: mean over MODEL tokens, and the most."""
    model = [segment for segment in tree.segments if segment.role is Role.MODEL]
    ages = [version - segment.policy_version for segment in model]
    tokens = sum(len(segment) for segment in model)
    return sum(age * len(s) for age, s in zip(ages, model, strict=True)) / max(1, tokens), max(ages, default=0)


def age_metrics(trees: Sequence[RolloutTree], version: int) -> dict[str, float]:
    """How old the weights are that have sampled the trees of the update of policy `version` (see `staleness`)."""
    ages = [staleness(tree, version) for tree in trees]
    return {
        "staleness": float(np.average([mean for mean, _ in ages], weights=[_sampled(tree) for tree in trees])),
        "staleness_max": max(most for _, most in ages),
        "stale_trees": sum(most > 0 for _, most in ages),
    }


def _sampled(tree: RolloutTree) -> int:
    """How many tokens the weights of a mean age sampled; 1 where there is none, so that a mean of such trees is one."""
    return max(1, sum(len(segment) for segment in tree.segments if segment.role is Role.MODEL))
