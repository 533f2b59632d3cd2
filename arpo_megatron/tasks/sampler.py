"""Which tasks a step trains on: shuffled epochs that a resumed run continues exactly."""

import random
from collections.abc import Sequence
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Task


class TaskSampler:
    """Goes through the tasks in shuffled epochs.

    Every epoch holds every task once. A batch may begin in one epoch and end in the next, but never holds a task
    twice: two trees of one task in one step would draw the same random numbers.

    Args:
        tasks: what is sampled from; a resumed run must give the same ones in the same order.
        seed: each epoch's order follows from it and the epoch's number.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self._epoch = 0
        self._order = self._shuffled(0)
        self._position = 0

    @property
    def epoch(self) -> int:
        """Number of the epoch the next task belongs to, from 0; it counts up when the first of its tasks is drawn."""
        return self._epoch

    def next_batch(self, count: int) -> list[Task]:
        """The next `count` different tasks. Raises UserError when there are fewer."""
        if count > len(self._tasks):
            raise UserError(f"train.tasks_per_step={count}, but there are only {len(self._tasks)} training tasks")
        drawn = self._order[self._position : self._position + count]
        self._position += len(drawn)
        missing = count - len(drawn)
        if missing:
            self._epoch += 1
            self._order = self._after(drawn, self._shuffled(self._epoch), missing)
            self._position = missing
            drawn = drawn + self._order[:missing]
        return [self._tasks[index] for index in drawn]

    def state_dict(self) -> dict[str, Any]:
        """JSON-safe position; the order itself is part of it, whatever a later version's shuffle does."""
        return {
            "seed": self._seed,
            "tasks": len(self._tasks),
            "epoch": self._epoch,
            "position": self._position,
            "order": list(self._order),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises UserError for the state of other tasks or another seed."""
        if state["tasks"] != len(self._tasks) or state["seed"] != self._seed:
            raise UserError(
                f"the checkpoint was made with {state['tasks']} tasks and seed {state['seed']}, but this job has "
                f"{len(self._tasks)} tasks and seed {self._seed}: start a new run, or restore its data and seed"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = list(state["order"])

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        random.Random(f"task-order-{self._seed}-{epoch}").shuffle(order)
        return order

    @staticmethod
    def _after(tail: list[int], order: list[int], count: int) -> list[int]:
        """`order` with its first `count` tasks that are not in `tail` moved to the front."""
        used = set(tail)
        first = [index for index in order if index not in used][:count]
        chosen = set(first)
        return first + [index for index in order if index not in chosen]
