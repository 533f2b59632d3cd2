"""Tasks that the policy does not yet solve nearly always."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import EpochSelector, draw_matching


@dataclass(slots=True)
class UnsaturatedTasks:
    """Leave a task out once `saturated_at` of the trajectories of its last tree have solved it.

    RAPO (arXiv 2509.24107, eq. 5) prunes at the end of each epoch; a task comes once per epoch, so the effect is the
    same. If too few tasks remain for a step, left-out tasks fill it up.
    """

    tasks: Sequence[Task]
    """All tasks."""
    seed: int
    """Seed of the epochs' orders."""
    saturated_at: float = 0.9
    """Share of solved trajectories, 0.9 in the paper."""
    success_above: float = 0.5
    """A trajectory solves a task if its accuracy exceeds this."""
    _epochs: EpochSelector = field(init=False)
    _pruned: set[str] = field(default_factory=set, init=False)
    _left_out: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._epochs = EpochSelector(self.tasks, self.seed)

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        """Return the next tasks that are not pruned; see `TaskSelector`."""
        tasks, self._left_out = draw_matching(self._epochs, count, lambda task: task.id not in self._pruned, begun)
        return tasks

    def record_result(self, task_id: str, accuracies: Sequence[float]) -> None:
        """Prune the task if a finished tree has saturated it."""
        solved = [accuracy > self.success_above for accuracy in accuracies]
        if solved and sum(solved) >= self.saturated_at * len(solved):
            self._pruned.add(task_id)

    def metrics(self) -> Mapping[str, float]:
        """Return the number of tasks passed over in the last draw, and of all pruned tasks."""
        return {"selector/left_out": self._left_out, "selector/pruned": len(self._pruned)}

    def state_dict(self) -> dict[str, Any]:
        """Return the order, and the pruned tasks."""
        return {**self._epochs.state_dict(), "pruned": sorted(self._pruned)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. Raises UserError for that of other tasks or another seed."""
        self._epochs.load_state_dict(state)
        self._pruned = set(state.get("pruned", []))
