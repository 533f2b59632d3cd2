"""Which tasks a step trains on: shuffled epochs that a resumed run continues exactly."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.errors import UserError
from arpo_megatron.registry import ExtensionPoint, make
from arpo_megatron.tasks.base import Task


class TaskSelector(Protocol):
    """Chooses the tasks of a step from what earlier ones have earned. Deterministic; only the controller asks it.

    A part of `algorithm.selector` is made with `tasks`, `seed` and numbers of its own.
    """

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        """The next `count` different tasks, without those of `begun`; fewer where no others are left.

        Args:
            count: how many are wanted.
            begun: ids of tasks that the step has begun already. A second tree of one of them in the same step would
                draw the same random numbers: a copy.

        Raises:
            UserError: there are fewer tasks than `count` in all.
        """

    def note(self, task_id: str, accuracies: Sequence[float]) -> None:
        """A finished tree of a training task: how right the answer of each of its leaves is, in [0, 1]."""

    def metrics(self) -> Mapping[str, float]:
        """Figures of the step, under names of their own (`selector/...`)."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-safe; all that the next choices depend on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises UserError for the state of another selector."""


def make_task_selector(config: AlgorithmConfig, tasks: Sequence[Task], seed: int) -> TaskSelector:
    """The part that `algorithm.selector` names. Raises UserError."""
    selector: TaskSelector = make(
        ExtensionPoint.TASK_SELECTOR, config.selector, {**config.component_params(), "tasks": tasks, "seed": seed}
    )
    return selector


@dataclass(slots=True)
class EpochSelector:
    """Goes through the tasks in shuffled epochs.

    Every epoch holds every task once. A batch may begin in one epoch and end in the next, but never holds a task twice,
    nor one that its step has begun already: such a task keeps its turn for a later step.

    Attributes:
        tasks: what is sampled from; a resumed run must give the same ones in the same order.
        seed: each epoch's order follows from it and the epoch's number.
        epoch: number of the epoch the next task belongs to, from 0; it counts up when the first of its tasks is drawn.
    """

    tasks: Sequence[Task]
    seed: int
    epoch: int = field(default=0, init=False)
    _order: list[int] = field(init=False)
    _position: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._order = self._shuffled(0)

    def note(self, task_id: str, accuracies: Sequence[float]) -> None:
        """The order does not depend on it."""

    def metrics(self) -> Mapping[str, float]:
        """None."""
        return {}

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        """See `TaskSelector`."""
        check_enough(self.tasks, count)
        used = {index for index, task in enumerate(self.tasks) if task.id in begun}
        count = min(count, len(self.tasks) - len(used))
        drawn = self._draw(count, used)
        if len(drawn) < count:
            self.epoch += 1
            self._order, self._position = self._shuffled(self.epoch), 0
            drawn += self._draw(count - len(drawn), used.union(drawn))
        return [self.tasks[index] for index in drawn]

    def state_dict(self) -> dict[str, Any]:
        """JSON-safe position; the order itself is part of it, whatever a later version's shuffle does."""
        return {
            "seed": self.seed,
            "tasks": len(self.tasks),
            "epoch": self.epoch,
            "position": self._position,
            "order": list(self._order),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises UserError for the state of other tasks or another seed."""
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
        """Up to `count` tasks of this epoch that are not in `used`, which come later in it."""
        rest = self._order[self._position :]
        drawn = [index for index in rest if index not in used][:count]
        chosen = set(drawn)
        self._order[self._position :] = drawn + [index for index in rest if index not in chosen]
        self._position += len(drawn)
        return drawn


def check_enough(tasks: Sequence[Task], count: int) -> None:
    """Raises UserError where there are fewer tasks than a batch of `count` needs."""
    if count > len(tasks):
        raise UserError(f"{count} different tasks are wanted at once, but there are only {len(tasks)} training tasks")


def passing(
    epochs: EpochSelector, count: int, wanted: Callable[[Task], bool], begun: Collection[str] = ()
) -> tuple[list[Task], int]:
    """The next `count` different tasks that are wanted, filled up with others where too few are.

    Args:
        epochs: where they come from.
        count: how many.
        wanted: whether a task is.
        begun: see `TaskSelector.next_batch`.

    Returns:
        the tasks, and how many were passed over. Raises UserError when there are fewer tasks than `count`.
    """
    check_enough(epochs.tasks, count)
    chosen, passed = dict[str, Task](), dict[str, Task]()
    # In two epochs every task comes by; one that came twice is passed over.
    for _ in range(2 * len(epochs.tasks)):
        if len(chosen) == count:
            return list(chosen.values()), len(passed)
        for task in epochs.next_batch(1, begun):
            (chosen if wanted(task) else passed).setdefault(task.id, task)
    fill = [task for task in passed.values() if task.id not in chosen]
    return [*chosen.values(), *fill][:count], len(passed)
