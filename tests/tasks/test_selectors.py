"""Selectors by difficulty: tasks left out or preferred, no task twice in a batch, the same draws after a resume."""

import json
import math
from collections import Counter

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import TaskSelector
from arpo_megatron.tasks.selectors.solvable import SolvableTasks
from arpo_megatron.tasks.selectors.targeted import TargetedTasks
from arpo_megatron.tasks.selectors.unsaturated import UnsaturatedTasks

TASKS = [Task(f"t{number}", (), "", "math", "") for number in range(6)]
SOLVED = {"t0": 0.0, "t1": 0.6, "t2": 0.9, "t3": 1.0, "t4": 0.4, "t5": 0.8}
"""Share of the trajectories of each task that solve it."""


def drawn(selector: TaskSelector, count: int, solved: dict[str, float] = SOLVED) -> list[str]:
    ids = [task.id for task in selector.next_batch(count)]
    assert len(set(ids)) == count
    for task_id in ids:
        right = round(10 * solved[task_id])
        selector.record_result(task_id, [1.0] * right + [0.0] * (10 - right))
    return ids


def test_unsaturated_tasks_prune_saturated_ones() -> None:
    selector = UnsaturatedTasks(TASKS, 3)
    assert sorted(drawn(selector, 6)) == [task.id for task in TASKS]
    for _ in range(5):
        assert set(drawn(selector, 4)) == {"t0", "t1", "t4", "t5"}
    assert selector.metrics()["selector/pruned"] == 2
    drawn(selector, 4, dict.fromkeys(SOLVED, 1.0))  # now all are, and batches are filled up
    assert len(drawn(selector, 5)) == 5
    assert selector.metrics() == {"selector/left_out": 6, "selector/pruned": 6}


def test_targeted_tasks_are_all_tried_first() -> None:
    selector = TargetedTasks(TASKS, 1, difficulty_temperature=0.01)
    assert sorted(drawn(selector, 3) + drawn(selector, 3)) == [task.id for task in TASKS]
    for _ in range(10):
        assert set(drawn(selector, 2)) == {"t1", "t4"}
    assert selector.metrics() == {"selector/tried": 6, "selector/distance": pytest.approx(1.9 / 6)}


def test_targeted_draws_follow_their_weights() -> None:
    """A single draw from all tasks follows the softmax."""
    selector = TargetedTasks(TASKS, 5, difficulty_temperature=0.2)
    drawn(selector, 6)
    counts = Counter(drawn(selector, 1)[0] for _ in range(4000))
    weights = {name: math.exp(-abs(success - 0.5) / 0.2) for name, success in SOLVED.items()}
    for name, weight in weights.items():
        assert counts[name] / 4000 == pytest.approx(weight / sum(weights.values()), abs=0.03)


def test_targeted_tasks_in_flight_are_drawn_last() -> None:
    selector = TargetedTasks(TASKS, 2)
    first = {task.id for task in selector.next_batch(3)}
    second = {task.id for task in selector.next_batch(3)}
    assert not first & second
    assert {task.id for task in selector.next_batch(3)} == first  # the longest in flight


@pytest.mark.parametrize("kind", [SolvableTasks, TargetedTasks, UnsaturatedTasks])
@pytest.mark.parametrize("seed", range(4))
def test_refills_of_a_step_never_repeat_a_task(kind: type, seed: int) -> None:
    selector = kind(TASKS, seed)
    drawn(selector, 3)
    for _ in range(6):
        begun: list[str] = []
        for wanted, found in ((2, 2), (3, 3), (2, 1), (1, 0)):  # the previous step has recorded all its trees
            more = [task.id for task in selector.next_batch(wanted, begun)]
            assert len(more) == found
            begun += more
        assert sorted(begun) == [task.id for task in TASKS]
        for task_id in begun:
            selector.record_result(task_id, [SOLVED[task_id]])


@pytest.mark.parametrize("kind", [TargetedTasks, UnsaturatedTasks])
def test_resumed_selector_draws_the_same(kind: type) -> None:
    selector = kind(TASKS, 1)
    for _ in range(4):
        drawn(selector, 2)
    selector.next_batch(2)
    resumed = kind(TASKS, 1)
    resumed.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    assert [drawn(selector, 2) for _ in range(4)] == [drawn(resumed, 2) for _ in range(4)]


@pytest.mark.parametrize("kind", [TargetedTasks, UnsaturatedTasks])
def test_selector_errors_are_one_line(kind: type) -> None:
    with pytest.raises(UserError, match="only 6 training tasks"):
        kind(TASKS, 1).next_batch(7)
    with pytest.raises(UserError, match="other tasks" if kind is TargetedTasks else "with 6 tasks"):
        kind(TASKS[:5], 1).load_state_dict(kind(TASKS, 1).state_dict())
