"""Tasks that the policy has solved at least once."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import EpochSelector, draw_matching


@dataclass(slots=True)
class SolvableTasks:
    """Draw every task in the first epoch; later leave out those that no trajectory has ever solved.

    GUI-ARPO (Agentic Replay Policy Optimization, arXiv 2505.16282) filters its tasks by the policy's successes before
    training. Here the first epoch is that measurement, and its samples are trained on. If too few tasks remain for a
    step, left-out tasks fill it up.
    """

    tasks: Sequence[Task]
    """All tasks."""
    seed: int
    """Seed of the epochs' orders."""
    success_above: float = 0.5
    """A trajectory solves a task if its accuracy exceeds this."""
    _epochs: EpochSelector = field(init=False)
    _tried: set[str] = field(default_factory=set, init=False)
    _solved: set[str] = field(default_factory=set, init=False)
    _left_out: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._epochs = EpochSelector(self.tasks, self.seed)

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        """Return the next solvable tasks; see `TaskSelector`."""
        tasks, self._left_out = draw_matching(self._epochs, count, self._wanted, begun)
        return tasks

    def _wanted(self, task: Task) -> bool:
        return not self._epochs.epoch or task.id not in self._tried or task.id in self._solved

    def record_result(self, task_id: str, accuracies: Sequence[float]) -> None:
        """Record whether a tree has solved its task."""
        self._tried.add(task_id)
        if any(accuracy > self.success_above for accuracy in accuracies):
            self._solved.add(task_id)

    def metrics(self) -> Mapping[str, float]:
        """Return the number of tasks passed over in the last draw."""
        return {"selector/left_out": self._left_out}

    def state_dict(self) -> dict[str, Any]:
        """Return the order, and which tasks were tried and solved."""
        return {**self._epochs.state_dict(), "tried": sorted(self._tried), "solved": sorted(self._solved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. Raises UserError for that of other tasks or another seed."""
        self._epochs.load_state_dict(state)
        self._tried, self._solved = set(state.get("tried", [])), set(state.get("solved", []))
