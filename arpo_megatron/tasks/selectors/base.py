"""The protocol of task selectors, and shuffled epochs that a resumed run continues exactly."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.errors import UserError
from arpo_megatron.registry import ExtensionPoint, make
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.files.mixture import MixedTasks, MixtureSelector


class TaskSelector(Protocol):
    """Chooses the tasks of a step by the results of earlier ones. Deterministic; only the controller uses it.

    A component of `algorithm.selector` is built with `tasks`, `seed` and its own params.
    """

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        """Return the next `count` different tasks, none of them in `begun`; fewer if no others are left.

        Args:
            count: number of tasks.
            begun: ids of tasks that the step has already started. A second tree of such a task in the same step would
                draw the same random numbers and be a copy.

        Raises:
            UserError: there are fewer than `count` tasks.
        """

    def record_result(self, task_id: str, accuracies: Sequence[float]) -> None:
        """Record a finished tree of a training task: the accuracy of each of its leaves, in [0, 1]."""

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the step, named `selector/...`."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next choices depend on, JSON-safe."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. Raises UserError for that of another selector."""


def make_task_selector(config: AlgorithmConfig, tasks: Sequence[Task], seed: int) -> TaskSelector:
    """Build the selector that `algorithm.selector` names, for a mixture one per data set. Raises UserError."""
    if isinstance(tasks, MixedTasks):
        return MixtureSelector(tasks, lambda part, number: make_task_selector(config, part, seed + number))
    selector: TaskSelector = make(
        ExtensionPoint.TASK_SELECTOR, config.selector, {**config.component_params(), "tasks": tasks, "seed": seed}
    )
    return selector


@dataclass(slots=True)
class EpochSelector:
    """Draws the tasks in shuffled epochs.

    Every epoch holds every task once. A batch may start in one epoch and end in the next. It never holds a task twice,
    nor one that its step has already started: such a task is kept for a later step.
    """

    tasks: Sequence[Task]
    """All tasks; a resumed run must have the same ones in the same order."""
    seed: int
    """Seed of each epoch's order, together with the epoch's number."""
    epoch: int = field(default=0, init=False)
    """Number of the epoch of the next task, from 0; it increases when the first of its tasks is drawn."""
    _order: list[int] = field(init=False)
    _position: int = field(default=0, init=False)
    _numbers: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._order = self._shuffled(0)

    def number_of(self, task_id: str) -> int:
        """Return the place of a task in `tasks`; KeyError for an unknown one."""
        number = self._index_of(task_id)
        if number is None:
            raise KeyError(task_id)
        return number

    def _index_of(self, task_id: str) -> int | None:
        if not self._numbers:  # read once: the tasks may be on disk
            self._numbers = {task.id: number for number, task in enumerate(self.tasks)}
        return self._numbers.get(task_id)

    def record_result(self, task_id: str, accuracies: Sequence[float]) -> None:
        """Ignore the result: the order does not depend on it."""

    def metrics(self) -> Mapping[str, float]:
        """Return an empty mapping: the order of the epochs has no metrics."""
        return {}

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        """Return the next tasks of the epochs; see `TaskSelector`."""
        check_enough(self.tasks, count)
        used = {index for name in begun if (index := self._index_of(name)) is not None}
        count = min(count, len(self.tasks) - len(used))
        drawn = self._draw(count, used)
        if len(drawn) < count:
            self.epoch += 1
            self._order, self._position = self._shuffled(self.epoch), 0
            drawn += self._draw(count - len(drawn), used.union(drawn))
        return [self.tasks[index] for index in drawn]

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-safe position. The order is part of it, so that a later version's shuffle does not matter."""
        return {
            "seed": self.seed,
            "tasks": len(self.tasks),
            "epoch": self.epoch,
            "position": self._position,
            "order": list(self._order),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. Raises UserError for that of other tasks or another seed."""
        if state["tasks"] != len(self.tasks) or state["seed"] != self.seed:
            raise UserError(
                f"the checkpoint was made with {state['tasks']} tasks and seed {state['seed']}, but this job has "
                f"{len(self.tasks)} tasks and seed {self.seed}: start a new run, or restore its data and seed"
            )
        self.epoch, self._position = state["epoch"], state["position"]
        self._order = list(state["order"])

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.tasks)))
        random.Random(f"task-order-{self.seed}-{epoch}").shuffle(order)
        return order

    def _draw(self, count: int, used: set[int]) -> list[int]:
        """Return up to `count` tasks of this epoch that are not in `used`; those move to its end."""
        rest = self._order[self._position :]
        drawn = [index for index in rest if index not in used][:count]
        chosen = set(drawn)
        self._order[self._position :] = drawn + [index for index in rest if index not in chosen]
        self._position += len(drawn)
        return drawn


def check_enough(tasks: Sequence[Task], count: int) -> None:
    """Raise UserError if there are fewer tasks than a batch of `count` needs."""
    if count > len(tasks):
        raise UserError(
            f"a step needs {count} different tasks, but there are only {len(tasks)} training tasks: "
            "lower train.tasks_per_step or add data"
        )


def draw_matching(
    epochs: EpochSelector, count: int, wanted: Callable[[Task], bool], begun: Collection[str] = ()
) -> tuple[list[Task], int]:
    """Return the next `count` different tasks that match a filter, filled up with others if too few do.

    Args:
        epochs: the source of the tasks.
        count: number of tasks.
        wanted: whether a task matches.
        begun: see `TaskSelector.next_batch`.

    Returns:
        The tasks, and the number of tasks passed over. Raises UserError if there are fewer than `count` tasks.
    """
    check_enough(epochs.tasks, count)
    chosen, passed = dict[str, Task](), dict[str, Task]()
    # Two epochs hold every task; one that comes twice is passed over.
    for _ in range(2 * len(epochs.tasks)):
        if len(chosen) == count:
            return list(chosen.values()), len(passed)
        for task in epochs.next_batch(1, begun):
            (chosen if wanted(task) else passed).setdefault(task.id, task)
    fill = [task for task in passed.values() if task.id not in chosen]
    return [*chosen.values(), *fill][:count], len(passed)
