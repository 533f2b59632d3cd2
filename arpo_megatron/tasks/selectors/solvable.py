"""Tasks that the policy can solve at all."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import EpochSelector, passing


@dataclass(slots=True)
class SolvableTasks:
    """The first epoch has every task; later ones leave out those that no trajectory has ever solved.

    GUI-ARPO (Agentic Replay Policy Optimization, arXiv 2505.16282) filters its tasks by the successes of the policy
    before training; here the first epoch is that measurement, and what it samples is trained on. Where fewer tasks than
    a step needs are left, those left out fill it up.

    Attributes:
        tasks: what is chosen from.
        seed: of the epochs' orders.
        success_above: a task is solved by a trajectory whose accuracy exceeds this.
    """

    tasks: Sequence[Task]
    seed: int
    success_above: float = 0.5
    _epochs: EpochSelector = field(init=False)
    _tried: set[str] = field(default_factory=set, init=False)
    _solved: set[str] = field(default_factory=set, init=False)
    _left_out: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._epochs = EpochSelector(self.tasks, self.seed)

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        """See `TaskSelector`."""
        found, self._left_out = passing(self._epochs, count, self._wanted, begun)
        return found

    def _wanted(self, task: Task) -> bool:
        return not self._epochs.epoch or task.id not in self._tried or task.id in self._solved

    def note(self, task_id: str, accuracies: Sequence[float]) -> None:
        """A finished tree."""
        self._tried.add(task_id)
        if any(accuracy > self.success_above for accuracy in accuracies):
            self._solved.add(task_id)

    def metrics(self) -> Mapping[str, float]:
        """Tasks passed over in the last draw."""
        return {"selector/left_out": self._left_out}

    def state_dict(self) -> dict[str, Any]:
        """The order, and what is known of each task."""
        return {**self._epochs.state_dict(), "tried": sorted(self._tried), "solved": sorted(self._solved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises UserError for the state of other tasks or another seed."""
        self._epochs.load_state_dict(state)
        self._tried, self._solved = set(state.get("tried", [])), set(state.get("solved", []))
