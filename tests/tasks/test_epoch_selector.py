"""The epoch selector: epochs without loss or repetition, and exact resumption."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import EpochSelector


def tasks(count: int) -> list[Task]:
    return [Task(f"t{index}", (), "", "qa", "") for index in range(count)]


def ids(selector: EpochSelector, count: int, batches: int) -> list[list[str]]:
    return [[task.id for task in selector.next_batch(count)] for _ in range(batches)]


sizes = st.integers(1, 12).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))


@given(sizes, st.integers(0, 100), st.integers(1, 12))
def test_epochs_hold_every_task_once(size: tuple[int, int], seed: int, batches: int) -> None:
    count, batch = size
    drawn = [one for group in ids(EpochSelector(tasks(count), seed), batch, batches) for one in group]
    for start in range(0, len(drawn) - count + 1, count):
        assert len(set(drawn[start : start + count])) == count
    counts = Counter(drawn)
    assert max(counts.values()) - min(counts[f"t{index}"] for index in range(count)) <= 1


@given(sizes, st.integers(0, 100))
def test_batch_never_holds_a_task_twice(size: tuple[int, int], seed: int) -> None:
    count, batch = size
    for group in ids(EpochSelector(tasks(count), seed), batch, 10):
        assert len(set(group)) == batch


@given(sizes, st.integers(0, 100), st.lists(st.integers(1, 12), max_size=3), st.integers(1, 8))
def test_step_with_refills_never_begins_a_task_twice(
    size: tuple[int, int], seed: int, refills: list[int], steps: int
) -> None:
    """This holds for draws across the end of an epoch, and no task loses a turn."""
    count, batch = size
    selector, drawn = EpochSelector(tasks(count), seed), list[str]()
    for _ in range(steps):
        begun: list[str] = []
        for wanted in [batch, *(min(refill, count) for refill in refills)]:
            found = [task.id for task in selector.next_batch(wanted, begun)]
            assert len(found) == min(wanted, count - len(begun))
            begun += found
        assert len(set(begun)) == len(begun)
        drawn += begun
    for start in range(0, len(drawn) - count + 1, count):
        assert len(set(drawn[start : start + count])) == count


@given(sizes, st.integers(0, 100), st.integers(0, 10))
def test_resumed_epochs_continue_exactly(size: tuple[int, int], seed: int, before: int) -> None:
    count, batch = size
    selector = EpochSelector(tasks(count), seed)
    ids(selector, batch, before)
    saved = json.dumps(selector.state_dict())
    expected = ids(selector, batch, 10)
    resumed = EpochSelector(tasks(count), seed)
    resumed.load_state_dict(json.loads(saved))
    assert ids(resumed, batch, 10) == expected


def test_epochs_and_seeds_differ_in_order() -> None:
    selector = EpochSelector(tasks(50), 1)
    first, second = ids(selector, 50, 2)
    assert first != second
    assert selector.epoch == 1
    assert ids(EpochSelector(tasks(50), 2), 50, 1) != [first]


def test_too_few_tasks_and_a_foreign_state_are_user_errors() -> None:
    with pytest.raises(UserError, match=r"4 different tasks, .* only 3 .*: lower train\.tasks_per_step or add data$"):
        EpochSelector(tasks(3), 0).next_batch(4)
    state = EpochSelector(tasks(3), 0).state_dict()
    for other in (EpochSelector(tasks(4), 0), EpochSelector(tasks(3), 1)):
        with pytest.raises(UserError, match="start a new run"):
            other.load_state_dict(state)
