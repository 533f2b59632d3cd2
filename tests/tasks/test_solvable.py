"""Tasks that were never solved are left out after the first epoch, counted, and used again if others lack."""

import json

from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.solvable import SolvableTasks

TASKS = [Task(f"t{number}", (), "", "math", "") for number in range(6)]


def drawn(selector: SolvableTasks, count: int, solved: set[str]) -> list[str]:
    ids = [task.id for task in selector.next_batch(count)]
    for task_id in ids:
        selector.record_result(task_id, [0.0, 1.0 if task_id in solved else 0.0])
    return ids


def test_solvable_tasks_are_all_in_the_first_epoch_and_solved_later() -> None:
    selector, solved = SolvableTasks(TASKS, 3), {"t1", "t4", "t5"}
    assert sorted(drawn(selector, 6, solved)) == [task.id for task in TASKS]
    for _ in range(4):
        assert set(drawn(selector, 3, solved)) == solved
    drawn(selector, 3, solved)
    assert selector.metrics()["selector/left_out"] > 0


def test_solvable_batches_are_filled_up_without_repetition() -> None:
    selector = SolvableTasks(TASKS, 3)
    for solved in (set(), {"t0"}, set()):
        for _ in range(3):
            ids = drawn(selector, 5, solved)
            assert len(set(ids)) == 5


def test_resumed_selector_draws_the_same() -> None:
    selector, solved = SolvableTasks(TASKS, 1), {"t2", "t3"}
    for _ in range(4):
        drawn(selector, 2, solved)
    resumed = SolvableTasks(TASKS, 1)
    resumed.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    assert [drawn(selector, 2, solved) for _ in range(4)] == [drawn(resumed, 2, solved) for _ in range(4)]
