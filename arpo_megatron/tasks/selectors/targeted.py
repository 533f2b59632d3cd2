"""Tasks of a target difficulty, from which the policy learns most."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Annotated, Any

from pydantic import Field

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import check_enough


@dataclass(slots=True)
class TargetedTasks:
    """Draws without replacement with P ~ exp(-|p - difficulty_target| / difficulty_temperature), p a task's success.

    Difficulty-targeted online data selection (DOTS, arXiv 2506.05316, section 4.2 and algorithm 1, line 10), which
    states it for the difficulty 1 - p. There p is predicted for all tasks before every draw, from the similarity of
    their embeddings to a few tried tasks. Here p is the mean accuracy of the task's last tree, and an untried task
    counts as on target, so that it is tried early. Tasks far from the target return as the temperature permits; its
    default is ours. A task in flight is not drawn again while others can be. The paper's replay is
    `algorithm.replay=rollout_replay`.
    """

    tasks: Sequence[Task]
    """All tasks."""
    seed: int
    difficulty_target: float = 0.5
    """Target success, 1 - alpha; 0.5 in the paper."""
    difficulty_temperature: Annotated[float, Field(gt=0)] = 0.1
    """tau."""
    _success: dict[str, float] = field(default_factory=dict, init=False)
    _in_flight: dict[str, None] = field(default_factory=dict, init=False)
    _draws: int = field(default=0, init=False)

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        """Draw tasks by their distance to the target; see `TaskSelector`."""
        check_enough(self.tasks, count)
        others = [task.id for task in self.tasks if task.id not in begun]
        missing = min(count, len(others)) - sum(name not in self._in_flight for name in others)
        if missing > 0:  # release those longest in flight
            for name in [name for name in self._in_flight if name not in begun][:missing]:
                del self._in_flight[name]
        draw, self._draws = random.Random(f"targeted-{self.seed}-{self._draws}"), self._draws + 1
        keys = [(self._score(task) + _gumbel(draw), number) for number, task in enumerate(self.tasks)]
        taken = {*self._in_flight, *begun}
        free = [(key, number) for key, number in keys if self.tasks[number].id not in taken]
        chosen = [self.tasks[number] for _, number in sorted(free, reverse=True)[:count]]
        self._in_flight.update((task.id, None) for task in chosen)
        return chosen

    def record_result(self, task_id: str, accuracies: Sequence[float]) -> None:
        """Record the mean accuracy of a finished tree."""
        if accuracies:
            self._success[task_id] = sum(accuracies) / len(accuracies)
        self._in_flight.pop(task_id, None)

    def metrics(self) -> Mapping[str, float]:
        """Return the number of tried tasks, and their mean distance to the target."""
        apart = [abs(success - self.difficulty_target) for success in self._success.values()]
        return {"selector/tried": len(apart), **({"selector/distance": sum(apart) / len(apart)} if apart else {})}

    def state_dict(self) -> dict[str, Any]:
        """Return each task's success, the tasks in flight, and the number of draws."""
        return {
            "seed": self.seed,
            "tasks": len(self.tasks),
            "draws": self._draws,
            "success": dict(self._success),
            "in_flight": list(self._in_flight),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. Raises UserError for that of other tasks or another selector."""
        if "draws" not in state or state["tasks"] != len(self.tasks) or state["seed"] != self.seed:
            raise UserError(
                "the checkpoint was made with other tasks, another seed or another algorithm.selector: start a new "
                "run, or restore them"
            )
        self._draws, self._success = state["draws"], dict(state["success"])
        self._in_flight = dict.fromkeys(state["in_flight"])

    def _score(self, task: Task) -> float:
        success = self._success.get(task.id, self.difficulty_target)
        return -abs(success - self.difficulty_target) / self.difficulty_temperature


def _gumbel(draw: random.Random) -> float:
    """Draw Gumbel noise: the tasks with the largest sums of log-weight and noise are a draw without replacement."""
    return -log(-log(max(draw.random(), 1e-300)))
