"""Tasks that the policy has failed are replayed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import EpochSelector, check_enough


@dataclass(slots=True)
class ReplayedFailures:
    """Draw a share of every batch from the tasks that a whole tree has failed, those that have waited longest first.

    DeepTravel (arXiv 2509.21842) replays from a buffer of failures now and then; its frequency is not public. A task
    leaves the buffer when it is drawn, and comes back if it is failed again. The rest of a batch follows the epochs.
    Experimental: the method is known from the paper's abstract, not from the paper or its authors' code.
    """

    tasks: Sequence[Task]
    """All tasks."""
    seed: int
    """Seed of the epochs' orders."""
    failure_share: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Largest share of a batch that is replayed; the default is ours."""
    success_above: float = 0.5
    """A trajectory solves a task if its accuracy exceeds this."""
    _epochs: EpochSelector = field(init=False)
    _failed: list[str] = field(default_factory=list, init=False)
    _replayed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._epochs = EpochSelector(self.tasks, self.seed)

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        """Return failed tasks up to their share, then the next ones of the epochs; see `TaskSelector`."""
        check_enough(self.tasks, count)
        most = round(count * self.failure_share)
        again = [name for name in self._failed if name not in begun][:most]
        self._replayed = len(again)
        rest = self._epochs.next_batch(count - len(again), {*begun, *again})
        drawn = {*again, *(task.id for task in rest)}
        self._failed = [name for name in self._failed if name not in drawn]
        return [*(self.tasks[self._epochs.number_of(name)] for name in again), *rest]

    def record_result(self, task_id: str, accuracies: Sequence[float]) -> None:
        """Add a task that no trajectory has solved to the buffer; remove one that is solved."""
        if not accuracies:
            return
        self._failed = [name for name in self._failed if name != task_id]
        if not any(accuracy > self.success_above for accuracy in accuracies):
            self._failed.append(task_id)

    def metrics(self) -> Mapping[str, float]:
        """Return the number of replayed tasks in the last draw, and of tasks in the buffer."""
        return {"selector/replayed": self._replayed, "selector/failed": len(self._failed)}

    def state_dict(self) -> dict[str, Any]:
        """Return the order, and the buffer."""
        return {**self._epochs.state_dict(), "failed": list(self._failed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. Raises UserError for that of other tasks or another seed."""
        self._epochs.load_state_dict(state)
        self._failed = list(state.get("failed", []))
