"""Tasks that the policy does not solve nearly always."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import EpochSelector, passing


@dataclass(slots=True)
class UnsaturatedTasks:
    """A task whose last tree was solved by `saturated_at` of its trajectories is left out from then on.

    RAPO (arXiv 2509.24107, eq. 5) prunes at the end of each epoch; a task comes by once an epoch, so that is the same.
    Where fewer tasks than a step needs are left, those left out fill it up.

    Attributes:
        tasks: what is chosen from.
        seed: of the epochs' orders.
        saturated_at: share of solved trajectories, 0.9 in the paper.
        success_above: a task is solved by a trajectory whose accuracy exceeds this.
    """

    tasks: Sequence[Task]
    seed: int
    saturated_at: float = 0.9
    success_above: float = 0.5
    _epochs: EpochSelector = field(init=False)
    _pruned: set[str] = field(default_factory=set, init=False)
    _left_out: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._epochs = EpochSelector(self.tasks, self.seed)

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        """See `TaskSelector`."""
        found, self._left_out = passing(self._epochs, count, lambda task: task.id not in self._pruned, begun)
        return found

    def note(self, task_id: str, accuracies: Sequence[float]) -> None:
        """A finished tree."""
        solved = [accuracy > self.success_above for accuracy in accuracies]
        if solved and sum(solved) >= self.saturated_at * len(solved):
            self._pruned.add(task_id)

    def metrics(self) -> Mapping[str, float]:
        """Tasks passed over in the last draw, and all that are pruned."""
        return {"selector/left_out": self._left_out, "selector/pruned": len(self._pruned)}

    def state_dict(self) -> dict[str, Any]:
        """The order, and what is pruned."""
        return {**self._epochs.state_dict(), "pruned": sorted(self._pruned)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises UserError for the state of other tasks or another seed."""
        self._epochs.load_state_dict(state)
        self._pruned = set(state.get("pruned", []))
