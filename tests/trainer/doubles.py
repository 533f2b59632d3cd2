"""Doubles of the rollout process and the task selector: real ones do not fail or drop on demand."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from arpo_megatron.errors import StoppedError
from arpo_megatron.rollout.accounting import RolloutCounts, rollout_stats
from arpo_megatron.rollout.messages import (
    CollectTrees,
    FailedTree,
    FinishTrees,
    RolloutProgress,
    RolloutReport,
    RolloutSettings,
    StaleEnginesError,
)
from arpo_megatron.rollout.record import UntrainedTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.trainer.collector import StepInProgress, TreeCollector
from arpo_megatron.tree import Role, RolloutTree


@dataclass
class Rollouts:
    """Finishes requested trees at once and in order; records every call."""

    calls: list[str] = field(default_factory=list)
    in_flight: list[Task] = field(default_factory=list)
    given: list[Task] = field(default_factory=list)
    interrupts: int = 0
    stale: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    waited: set[int | None] = field(default_factory=set)
    entries_each: int = 1
    failure: str = ""
    """Why every tree fails; "" if none does."""
    blocked: str = ""
    """The message of a blocked tool that is the reason."""
    fork_rates: dict[str, float | bool | str | None] = field(default_factory=dict)
    """`fork_rate` in the settings of each task's tree."""

    def start_trees(
        self, _purpose: str, tasks: Sequence[Task], *, step: int, version: int, settings: RolloutSettings
    ) -> None:
        self.calls.append(f"start {len(tasks)}")
        self.steps |= dict.fromkeys((task.id for task in tasks), step)
        self._store_rates([task.id for task in tasks], settings)
        self.in_flight += tasks

    def resume_trees(
        self,
        _purpose: str,
        trees: Sequence[tuple[Task, UntrainedTree]],
        *,
        version: int,
        settings: RolloutSettings,
    ) -> None:
        self.calls.append(f"resume {' '.join(tree.task_id for _, tree in trees)}")
        self.steps |= {tree.task_id: tree.step for _, tree in trees}
        self._store_rates([tree.task_id for _, tree in trees], settings)
        self.in_flight += [task for task, _ in trees]

    def _store_rates(self, names: Sequence[str], settings: RolloutSettings) -> None:
        assert settings.branching is not None
        self.fork_rates |= dict.fromkeys(names, settings.branching.params.get("fork_rate"))

    def unfinished_trees(self, _purpose: str) -> list[UntrainedTree]:
        trees, sampled = [*self.given, *self.in_flight], (b"what it has sampled",) * self.entries_each
        return [UntrainedTree(task.id, self.steps[task.id], 0, sampled) for task in trees]

    def discard_collected(self, _purpose: str) -> None:
        self.given.clear()

    def collect(
        self,
        request: CollectTrees,
        progress: Callable[[RolloutProgress], None],
        _finished: Callable[[Task, RolloutTree], None],
    ) -> RolloutReport:
        self.waited.add(request.finish_before)
        count = min(request.count or 0, len(self.in_flight))
        done, self.in_flight = self.in_flight[:count], self.in_flight[count:]
        self.given += done
        progress(RolloutProgress(0, count, 0))
        if self.interrupts:
            self.interrupts -= 1
            if not self.interrupts:  # the report is on its way
                raise StoppedError
        self.calls.append(f"collect {count}")
        trees = [RolloutTree(task.id, np.arange(2)) for task in done]
        for tree in trees:
            tree.add(0, Role.MODEL, [1], policy_version=self.versions.get(tree.task_id, 0))
        failed = [FailedTree(tree, self.failure, self.blocked) for tree in trees if self.failure]
        return RolloutReport(
            [] if failed else trees, failed, rollout_stats([], RolloutCounts(), [], failed=0, seconds=1.0)
        )

    def finish_trees(self, _request: FinishTrees, _progress: object) -> None:
        self.calls.append("finish")
        if self.stale:
            self.stale -= 1
            raise StaleEnginesError("http://engine")

    def stop_trees(self, _request: object) -> RolloutReport:
        self.calls.append("stop")
        given, self.in_flight = self.in_flight, []
        self.given += given
        done = [RolloutTree(task.id, np.arange(2)) for task in given[:1]]
        failed = [FailedTree(RolloutTree(task.id, np.arange(2)), "given up") for task in given[1:]]
        counts = RolloutCounts(tokens_sampled=7)
        return RolloutReport(done, failed, rollout_stats([], counts, [], failed=0, seconds=1.0))

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self, version: int) -> None:
        self.calls.append(f"resume {version}")


def task(name: str) -> Task:
    return Task(name, (), "1", "math", "")


class Selector:
    """Tasks t0, t1, ..."""

    def __init__(self) -> None:
        self.drawn = 0
        self.recorded: list[str] = []

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        self.drawn += count
        return [task(f"t{n}") for n in range(self.drawn - count, self.drawn)]

    def record_result(self, task_id: str, accuracies: Sequence[float]) -> None:
        self.recorded.append(task_id)

    def state_dict(self) -> dict[str, int]:
        return {"recorded": len(self.recorded)}


def current(collector: TreeCollector) -> StepInProgress:
    """The step that the collector is in."""
    assert collector.current is not None
    return collector.current


Start = Callable[..., tuple[TreeCollector, Rollouts]]
