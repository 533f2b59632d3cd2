"""Mixtures of data sets with weights, and changes of tasks that may be on disk."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, overload

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Task, VariesTasks


class MixedTasks(Sequence[Task]):
    """The tasks of several data sets one after the other, with the weight of each data set.

    Args:
        parts: weight and tasks of each data set; the weights are relative.
    """

    def __init__(self, parts: Sequence[tuple[float, Sequence[Task]]]) -> None:
        self.parts = tuple(parts)

    def __len__(self) -> int:
        return sum(len(tasks) for _, tasks in self.parts)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        rest = range(len(self))[index]
        for _, tasks in self.parts:
            if rest < len(tasks):
                return tasks[rest]
            rest -= len(tasks)
        raise IndexError(index)

    def __iter__(self) -> Iterator[Task]:
        for _, tasks in self.parts:
            yield from tasks


class ChangedTasks(Sequence[Task]):
    """Tasks that are changed when they are asked for."""

    def __init__(self, tasks: Sequence[Task], change: Callable[[Task], Task]) -> None:
        self._tasks = tasks
        self._change = change

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> "ChangedTasks": ...
    def __getitem__(self, index: int | slice) -> "Task | ChangedTasks":
        if isinstance(index, slice):
            return ChangedTasks(self._tasks[index], self._change)
        return self._change(self._tasks[index])

    def __iter__(self) -> Iterator[Task]:
        return map(self._change, self._tasks)


def change_tasks(tasks: Sequence[Task], change: Callable[[Task], Task]) -> Sequence[Task]:
    """Return all tasks changed; a mixture remains one, and tasks on disk remain there."""
    if isinstance(tasks, MixedTasks):
        return MixedTasks([(weight, change_tasks(part, change)) for weight, part in tasks.parts])
    return [change(task) for task in tasks] if isinstance(tasks, tuple | list) else ChangedTasks(tasks, change)


def shares(weights: Sequence[float], count: int, drawn: Sequence[int], most: Sequence[int]) -> list[int]:
    """Divide the next `count` draws so that all draws together follow the weights to within one draw a data set.

    Args:
        weights: relative weight of each data set.
        count: number of draws to divide.
        drawn: draws of each data set so far.
        most: largest number of the next draws for each data set; others get what it cannot have.
    """
    given, whole = [0] * len(weights), sum(weights)
    done = sum(drawn)
    for number in range(done + 1, done + count + 1):
        open_ = [part for part in range(len(weights)) if given[part] < most[part]]
        if not open_:
            break
        given[max(open_, key=lambda part: weights[part] / whole * number - drawn[part] - given[part])] += 1
    return given


class MixtureSelector:
    """Draws from several data sets in proportion to their weights, each by a task selector of its own.

    Args:
        parts: the data sets.
        make: builds the selector of a data set from its tasks and its number.
    """

    def __init__(self, parts: MixedTasks, make: Callable[[Sequence[Task], int], Any]) -> None:
        self._weights = [weight for weight, _ in parts.parts]
        self._tasks = [tasks for _, tasks in parts.parts]
        self._selectors = [make(tasks, number) for number, tasks in enumerate(self._tasks)]
        self._drawn = [0] * len(self._selectors)
        self._owner: dict[str, int] = {}

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        """Return the next tasks; see `TaskSelector`."""
        if count > (total := sum(map(len, self._tasks))):
            raise UserError(
                f"a step needs {count} different tasks, but there are only {total} training tasks: "
                "lower train.tasks_per_step or add data"
            )
        taken = Counter(self._owner.get(each) for each in begun)
        free = [len(tasks) - taken[part] for part, tasks in enumerate(self._tasks)]
        chosen: list[Task] = []
        for part, number in enumerate(shares(self._weights, count, self._drawn, free)):
            if not number:
                continue
            found = self._selectors[part].next_batch(number, begun)
            self._drawn[part] += len(found)
            self._owner |= {task.id: part for task in found}
            chosen += found
        return chosen

    def record_result(self, task_id: str, accuracies: Sequence[float]) -> None:
        """Pass the result to the selector of the task's data set."""
        self._selectors[self._owner[task_id]].record_result(task_id, accuracies)

    def variant(self, task_id: str) -> Task:
        """Return a drawn task with a changed prompt; KeyError for an unknown id."""
        selector = self._selectors[self._owner[task_id]]
        if not isinstance(selector, VariesTasks):
            raise KeyError(task_id)
        return selector.variant(task_id)

    def metrics(self) -> Mapping[str, float]:
        """Return the draws of each data set so far, and the metrics of its selector."""
        found = {f"selector/drawn_{part}": float(drawn) for part, drawn in enumerate(self._drawn)}
        for part, selector in enumerate(self._selectors):
            found |= {f"{name}_{part}": value for name, value in selector.metrics().items()}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all selectors."""
        states = [selector.state_dict() for selector in self._selectors]
        return {"weights": self._weights, "drawn": self._drawn, "owner": self._owner, "parts": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. Raises UserError for that of another mixture."""
        if state.get("weights") != self._weights:
            raise UserError("the checkpoint was made with another mixture in data.path: restore it, or start a new run")
        for selector, part in zip(self._selectors, state["parts"], strict=True):
            selector.load_state_dict(part)
        self._drawn, self._owner = list(state["drawn"]), dict(state["owner"])
