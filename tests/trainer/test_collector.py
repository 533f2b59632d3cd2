"""Which trees a step trains, what happens to the others, and how trees in flight survive pushes, stops and kills.

The rollout process is a double; `tests/e2e` uses the real one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arpo_megatron.algorithms.branching.random_forks import at_rate, follows_arpo
from arpo_megatron.algorithms.replay.rollout_replay import RolloutReplay
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.errors import StoppedError, UserError
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.messages import (
    CollectTrees,
    RolloutReport,
)
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import EpochSelector
from arpo_megatron.tasks.selectors.hinted import HintedTasks
from arpo_megatron.trainer.collector import TreeCollector
from arpo_megatron.trainer.metrics import age_metrics
from arpo_megatron.trainer.step_journal import StepJournal
from arpo_megatron.tree import Role, RolloutTree
from tests.trainer.doubles import Rollouts, Selector, Start, current, task


def test_collector_replaces_trees_without_signal(collector: Start) -> None:
    held, rollouts = collector(lambda task: task not in ("t0", "t2"), max_refills=3)
    assert [item.tree.task_id for item in held.collect(0)] == ["t1", "t3", "t4", "t5"]
    assert rollouts.calls == ["start 4", "collect 4", "start 2", "collect 2"]
    assert current(held).dropped["no_signal"] == 2


def test_collector_uses_spare_trees_before_refills(collector: Start) -> None:
    held, rollouts = collector(lambda task: task not in ("t0", "t2"), max_refills=0, oversampling=0.5)
    assert [item.tree.task_id for item in held.collect(0)] == ["t1", "t3", "t4", "t5"]
    assert rollouts.calls == ["start 6", "collect 4", "collect 2"]


def test_step_trains_fewer_trees_after_the_last_refill(collector: Start) -> None:
    held, _ = collector(lambda task: task == "t5", max_refills=1)
    assert [item.tree.task_id for item in held.collect(0)] == ["t5"]
    assert current(held).dropped["no_signal"] == 7
    assert "step 1 trains 1 trees of 4" in held.events.path.read_text()


def test_step_without_trees_names_the_drops(collector: Start) -> None:
    held, _ = collector(lambda _task: False, max_refills=1)
    fix = r"raise rollout\.max_refills, .* or set algorithm\.drop_groups_without_signal=false$"
    with pytest.raises(UserError, match=rf"^step 1 has no tree to train \(8 no_signal\): {fix}"):
        held.collect(0)


def test_step_whose_trees_all_fail_ends_the_run_with_the_reason(collector: Start) -> None:
    held, rollouts = collector(max_refills=1)
    rollouts.failure = "KeyError: 'x' (its traceback is in rollout.log)"
    with pytest.raises(RuntimeError, match=r"no tree to train \(8 failed; the last failure: KeyError: 'x' \("):
        held.collect(0)
    assert rollouts.calls == ["start 4", "collect 4", "start 4", "collect 4"], "failed trees are replaced"


def test_blocked_tool_ends_the_run_with_the_fix(collector: Start) -> None:
    held, rollouts = collector()
    rollouts.failure = "ToolBlockedError: a text that the message does not repeat"
    rollouts.blocked = "The search tool is blocked: search.web.max_requests=3 is reached."
    with pytest.raises(
        UserError,
        match=r"^The search tool .* is reached\. Fix that, then continue the run with --resume",
    ):
        held.collect(0)


def test_repeated_push_does_not_pause_trees_again(collector: Start) -> None:
    held, rollouts = collector(max_staleness=1, across_push="drain")
    held.collect(0)
    rollouts.calls.clear()
    rollouts.stale = 1  # an engine is restarted while the trees are drained: some are not finished
    for _attempt in range(2):
        held.before_push()
    assert rollouts.calls == ["finish", "pause"]
    held.after_push(1)
    held.before_push()
    assert rollouts.calls == ["finish", "pause", "resume 1", "finish", "pause"]


def test_oversampled_trees_are_stored_with_their_cost(collector: Start) -> None:
    held, rollouts = collector(oversampling=0.75)
    assert len(held.collect(0)) == 4
    assert rollouts.calls == ["start 7", "collect 4", "stop"]
    assert [(item.tree.task_id, item.dropped, len(item.rewards)) for item in current(held).left_out] == [
        ("t5", "oversampled", 0),
        ("t6", "oversampled", 0),
        ("t4", "oversampled", 2),
    ]
    assert current(held).dropped == Counter(oversampled=3)
    assert sum(stats.counts.tokens_sampled for stats in current(held).stats) == 7
    assert held.in_flight == []


def test_stale_trees_are_dropped_and_replaced(collector: Start) -> None:
    held, rollouts = collector(max_staleness=1, stale="drop")
    rollouts.versions = {f"t{n}": 1 for n in range(9, 16)}  # t8 took longer: its first segment is of version 0
    steps = [[item.tree.task_id for item in held.collect(step)] for step in range(3)]
    assert steps == [["t0", "t1", "t2", "t3"], ["t4", "t5", "t6", "t7"], ["t9", "t10", "t11", "t12"]]
    assert [(item.tree.task_id, item.dropped) for item in current(held).left_out] == [("t8", "stale")]
    assert current(held).dropped["stale"] == 1
    assert rollouts.waited == {None}


def test_step_waits_for_trees_that_would_become_stale(collector: Start) -> None:
    held, rollouts = collector(max_staleness=2)
    held.collect(0)
    held.collect(5)
    assert rollouts.waited == {-1, 4}  # versions before which a tree that still grows is waited for


def test_resumed_run_continues_restored_trees_first(collector: Start) -> None:
    held, _ = collector(max_staleness=1)
    held.collect(0)
    assert [tree.task_id for tree in held.unfinished()] == [f"t{n}" for n in range(8)]
    held.end_step()
    trees = held.unfinished()
    assert [tree.task_id for tree in trees] == ["t4", "t5", "t6", "t7"]
    again, rollouts = collector(max_staleness=1)
    again.restore(trees, [task(tree.task_id) for tree in trees])
    assert again.unfinished() == trees  # a checkpoint before the next step loses none of them
    assert [item.tree.task_id for item in again.collect(1)] == ["t4", "t5", "t6", "t7"]
    assert rollouts.calls == ["resume t4 t5 t6 t7", "start 4", "collect 4"]
    assert [item.id for item in rollouts.in_flight] == ["t0", "t1", "t2", "t3"]


def test_matched_random_arm_forks_at_the_rate_of_the_step_before(collector: Start) -> None:
    held, rollouts = collector(max_staleness=1)
    algorithm, train = held.config.algorithm, held.config.train
    held.config = replace(held.config, algorithm=replace(algorithm, branching="random"), train=replace(train, steps=9))
    for chance in (0.25, None, 0.75):  # the second step measures no fork point
        held.collect(len(held.arpo_chances))
        held.end_step()
        held.arpo_chances.append(chance)
    started = {name: rollouts.steps[name] for name in rollouts.fork_rates}
    assert {started[name]: rate for name, rate in rollouts.fork_rates.items()} == {0: None, 1: 0.25, 2: 0.25}

    trees = held.unfinished()
    again, rollouts = collector(max_staleness=1)
    again.config, again.arpo_chances = held.config, list(held.arpo_chances)
    again.restore(trees, [task(tree.task_id) for tree in trees])
    again.collect(3)
    assert {rollouts.steps[name]: rate for name, rate in rollouts.fork_rates.items()} == {2: 0.25, 3: 0.75}


def test_resumed_run_continues_trees_with_changed_prompts(collector: Start) -> None:
    tasks = [Task(f"t{n}", ({"role": "user", "content": "q"},), "1", "math", "q", hint="abcd") for n in range(8)]
    held, _ = collector(lambda name: "#" in name, HintedTasks(tasks, 1))
    held.config = replace(held.config, algorithm=replace(held.config.algorithm, drop_groups_without_signal=False))
    held.collect(0)
    held.end_step()
    held.collect(1)
    trees = held.unfinished()
    assert all(tree.task_id.endswith("#hint1") for tree in trees)
    again, rollouts = collector(selector=HintedTasks(tasks, 1))
    again.restore(trees, tasks)
    again.collect(1)
    assert [each.prompt_text for each in rollouts.given] == ["q\nThe solution begins like this:\na"] * 4


def test_only_a_matched_random_arm_follows_arpo() -> None:
    free, fixed = AlgorithmConfig(branching="random"), AlgorithmConfig(branching="random", params={"fork_rate": 0.5})
    assert [follows_arpo(each) for each in (free, fixed, AlgorithmConfig())] == [True, False, False]
    assert at_rate(free, 0.3).params == {"fork_rate": 0.3}
    assert (at_rate(fixed, 0.3), at_rate(free, None)) == (fixed, free)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("interrupts", [1, 2], ids=["at-the-first-report", "in-the-refill"])
def test_stop_within_a_step_trains_every_task_once(collector: Start, staleness: int, interrupts: int) -> None:
    """Two steps are done and the third is in progress when the job is asked to end; no checkpoint is due."""
    tasks = [task(f"t{n}") for n in range(40)]
    order = [each.id for each in EpochSelector(tasks, 1).next_batch(16)]
    signal = {name: number % 3 > 0 for number, name in enumerate(order)}

    def begin() -> tuple[EpochSelector, TreeCollector, Rollouts]:
        selector = EpochSelector(tasks, 1)
        return selector, *collector(
            lambda name: signal.get(name, True), selector, max_staleness=staleness, max_refills=3
        )

    selector, held, rollouts = begin()
    trained = []
    for step in range(2):
        trained += held.collect(step)
        held.end_step()
    rollouts.interrupts = interrupts
    with pytest.raises(StoppedError):
        held.collect(2)
    state, left = selector.state_dict(), held.unfinished()

    selector, held, _ = begin()
    selector.load_state_dict(state)
    held.restore(left, tasks)
    for step in range(2, 4):
        trained += held.collect(step)
        dropped = current(held).left_out
        held.end_step()
    ids = [item.task.id for item in trained]
    assert len(ids) == len(set(ids)) == 16
    begun = {each.id for each in EpochSelector(tasks, 1).next_batch(selector.state_dict()["position"])}
    lost = begun - set(ids) - {item.task.id for item in dropped} - {name for name, good in signal.items() if not good}
    assert lost <= {tree.task_id for tree in held.unfinished()}


class Killed(BaseException):
    """Ends the process of a test at one point, as SIGKILL would."""


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("report", [1, 2])
def test_killed_run_continues_from_the_journal(collector: Start, tmp_path: Path, staleness: int, report: int) -> None:
    """The kill comes in the third step; the final write of an orderly end (`now=True`) does not happen."""
    tasks = [task(f"t{n}") for n in range(40)]
    path, warnings = tmp_path / "step_journal.msgpack", list[str]()

    class UntilKilled(StepJournal):
        def write(self, step: int, *state: Any, now: bool = False) -> None:
            if not killed:
                super().write(step, *state, now=now)

    def begin() -> tuple[EpochSelector, TreeCollector, Rollouts]:
        selector = EpochSelector(tasks, 1)
        held, rollouts = collector(lambda name: name not in given_up, selector, max_staleness=staleness, max_refills=3)
        held.journal = UntilKilled(path, tmp_path, 1, 0.0, warnings.append)
        return selector, held, rollouts

    given_up = {each.id for each in EpochSelector(tasks, 1).next_batch(16)[1::3]}
    killed = False
    selector, held, rollouts = begin()
    trained = []
    for step in range(2):
        trained += held.collect(step)
        held.end_step()

    collect, left = rollouts.collect, report

    def collect_until_killed(request: CollectTrees, *callbacks: Any) -> RolloutReport:
        nonlocal left, killed
        left -= 1
        found = collect(request, *callbacks)
        if left == 0:
            killed = True
            raise Killed
        return found

    rollouts.collect = collect_until_killed  # type: ignore[method-assign]  # its process dies
    with pytest.raises(Killed):
        held.collect(2)

    killed = False
    selector, held, rollouts = begin()
    moment = held.journal.read(2)
    assert moment is not None
    assert moment.trees
    selector.load_state_dict(moment.selector)
    held.restore(moment.trees, tasks)
    for step in range(2, 4):
        trained += held.collect(step)
        held.end_step()
    ids = [item.task.id for item in trained]
    assert len(ids) == len(set(ids)) == 16
    assert warnings == []


@pytest.mark.parametrize("interrupted", [False, True])
def test_step_starts_no_task_twice(collector: Start, interrupted: bool) -> None:
    """Two trees of one task in one step would have the same draws. With seven tasks epochs end within steps."""
    tasks = [task(f"t{n}") for n in range(7)]

    def begin() -> tuple[EpochSelector, TreeCollector, Rollouts]:
        selector = EpochSelector(tasks, 1)
        return selector, *collector(lambda name: name not in ("t0", "t3"), selector, max_refills=3)

    selector, held, rollouts = begin()
    for step in range(4):
        if interrupted:  # at the first report, before the refill
            rollouts.interrupts = 1
            with pytest.raises(StoppedError):
                held.collect(step)
            state, left = selector.state_dict(), held.unfinished()
            selector, held, rollouts = begin()
            selector.load_state_dict(state)
            held.restore(left, tasks)
        kept = [item.task.id for item in held.collect(step)]
        begun = kept + [item.task.id for item in current(held).left_out]
        assert len(kept) == 4
        assert len(set(begun)) == len(begun)
        held.end_step()


def test_step_trains_fewer_trees_when_no_task_is_left(collector: Start) -> None:
    held, rollouts = collector(lambda name: name == "t5", EpochSelector([task(f"t{n}") for n in range(6)], 1))
    assert [item.task.id for item in held.collect(0)] == ["t5"]
    assert current(held).dropped["no_signal"] == 5
    assert rollouts.calls == ["start 4", "collect 4", "start 2", "collect 2"]


def test_selector_learns_nothing_from_a_step_stopped_while_scoring(collector: Start) -> None:
    """The selector's state is stored with these trees; the resumed step reports them to it."""
    selector = Selector()
    held, rollouts = collector(selector=selector, oversampling=0.5)
    score = held.scorer.score

    def until_stopped(trees: Sequence[RolloutTree], tasks: Sequence[Task], *, step: int) -> list[ScoredTree]:
        if "stop" in rollouts.calls:
            raise StoppedError  # from the wait for a judge that is down
        return score(trees, tasks, step=step)

    held.scorer = SimpleNamespace(score=until_stopped, begin=lambda *_tree, step: None)  # type: ignore[assignment]
    with pytest.raises(StoppedError):
        held.collect(0)
    assert selector.recorded == []
    left = held.unfinished()
    assert [tree.task_id for tree in left] == [f"t{n}" for n in range(6)]
    again, _ = collector(selector=selector, oversampling=0.5)
    again.restore(left, [task(tree.task_id) for tree in left])
    again.collect(0)
    assert selector.recorded == ["t0", "t1", "t2", "t3"]


def test_selector_learns_of_trees_when_the_step_is_complete(collector: Start) -> None:
    selector = Selector()
    held, rollouts = collector(lambda name: name != "t0", selector, max_refills=1)
    rollouts.interrupts = 2
    with pytest.raises(StoppedError):
        held.collect(0)
    assert selector.recorded == []  # the resumed step scores and reports the trees again
    again, _ = collector(lambda name: name != "t0", selector, max_refills=1)
    again.restore(held.unfinished(), [task(tree.task_id) for tree in held.unfinished()])
    again.collect(0)
    assert selector.recorded == ["t0", "t1", "t2", "t3", "t4"]


def test_journal_has_the_selector_before_it_learned_of_the_step(collector: Start, tmp_path: Path) -> None:
    """Otherwise a resumed run would report the same trees to it twice."""
    held, _ = collector(selector=Selector())
    held.journal = StepJournal(tmp_path / "step_journal.msgpack", tmp_path, 1, 3600.0, pytest.fail)
    for step in range(2):
        held.collect(step)
        moment = held.journal.read(step)
        assert moment is not None
        assert moment.selector == {"recorded": 4 * step}
        held.end_step()


def test_journal_is_written_while_training_until_the_push(collector: Start, tmp_path: Path) -> None:
    """After the push newer weights sample, which a run that resumes within the step does not have."""
    held, rollouts = collector(selector=Selector(), max_staleness=1)
    held.journal = StepJournal(tmp_path / "step_journal.msgpack", tmp_path, 1, 0.0, pytest.fail)

    def written(step: int) -> tuple[int, int]:
        moment = held.journal.read(step)
        assert moment is not None
        return moment.selector["recorded"], moment.entries

    held.before_push()
    held.after_push(0)
    assert list(tmp_path.iterdir()) == []  # what a killed run has left is read when the first step begins
    for step in range(2):
        held.collect(step)
        assert written(step) == (4 * step, 8)
        rollouts.entries_each = 2
        held.write_journal()
        assert written(step) == (4 * step, 16)
        rollouts.entries_each = 3
        held.before_push()
        assert written(step) == (4 * step, 24)
        rollouts.entries_each = 4
        held.write_journal()
        held.after_push(step + 1)
        held.write_journal()
        held.end_step()
        held.write_journal()
        assert written(step) == (4 * step, 24)
        rollouts.entries_each = 1


def test_replay_buffer_adds_trees_to_a_step(collector: Start) -> None:
    held, _ = collector()
    held.replay = RolloutReplay(rollout_share=0.5)
    first, taken = held.collect(0), held.replay_snapshot()
    assert len(first) == 4 and taken is not None
    second = held.collect(1)
    assert [item.sampled for item in second] == [True, False] * 4
    assert {item.task.id for item in second if not item.sampled} == {item.task.id for item in first}
    assert held.replay.metrics()["replay/trees"] == 4


def test_stale_trees_are_counted() -> None:
    trees = [RolloutTree(f"t{n}", np.arange(2)) for n in range(3)]
    for tree, versions in zip(trees, ([2], [1, 2], [0]), strict=True):
        for above, version in enumerate(versions):
            tree.add(above, Role.MODEL, [1], policy_version=version)
    assert age_metrics(trees, 2) == {
        "staleness": pytest.approx((0 + 2 * 0.5 + 2) / 4),  # over tokens
        "staleness_max": 2,
        "stale_trees": 2,
    }
