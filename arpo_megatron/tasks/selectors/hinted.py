"""Tasks that the policy has failed come again with the beginning of their solution in the prompt."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated, Any

from pydantic import Field

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Message, Task
from arpo_megatron.tasks.selectors.base import EpochSelector, check_enough

_MARK = "#hint"
_INTRODUCTION = "\nThe solution begins like this:\n"
_CHECKED_TASKS = 1000
"""Tasks of which one must have a hint before a job starts."""


@dataclass(slots=True)
class HintedTasks:
    """Draw tasks in epochs; a task that a whole tree has failed comes again with a hint, then with a longer one.

    GHPO (arXiv 2507.10628) by its released code (`ghpo_trainer.py`): a group whose answers are all wrong is replaced by
    one that sees the first quarter of the solution, then a half, then three quarters. There it is sampled again within
    the step; here the task is among the first of the next step, so no step waits. Hinted prompts are trained as they
    were sampled. A tree's task id shows the hint, `train-204#hint2`. The hint is `Task.hint`, for example the column
    `data.columns.hint` of worked solutions, which is cut by characters.
    """

    tasks: Sequence[Task]
    """All tasks."""
    seed: int
    """Seed of the epochs' orders."""
    hint_step: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the solution that each further failure adds."""
    hint_most: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Largest share of the solution."""
    success_above: float = 0.5
    """A trajectory solves a task if its accuracy exceeds this."""
    _epochs: EpochSelector = field(init=False)
    _failed: list[str] = field(default_factory=list, init=False)
    _hinted: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._epochs = EpochSelector(self.tasks, self.seed)
        if not any(task.hint for task in islice(self.tasks, _CHECKED_TASKS)):
            raise UserError(
                "algorithm.selector=hinted needs hints: set data.columns.hint to a column of worked solutions"
            )

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        """Return failed tasks with hints, then the next ones of the epochs; see `TaskSelector`."""
        check_enough(self.tasks, count)
        again = [name for name in self._failed if name not in begun][:count]
        self._failed = [name for name in self._failed if name not in again]
        self._hinted = len(again)
        rest = self._epochs.next_batch(count - len(again), begun) if count > len(again) else []
        return [*(self.variant(name) for name in again), *rest]

    def record_result(self, task_id: str, accuracies: Sequence[float]) -> None:
        """Let a task come again with more of its solution if no trajectory has solved it."""
        if not accuracies or any(accuracy > self.success_above for accuracy in accuracies):
            return
        name, level = _read(task_id)
        more = f"{name}{_MARK}{level + 1}"
        if self._task(name).hint and (level + 1) * self.hint_step <= self.hint_most + 1e-9 and more not in self._failed:
            self._failed.append(more)

    def variant(self, task_id: str) -> Task:
        """Return the task with its hint; KeyError for an unknown task."""
        name, level = _read(task_id)
        task = self._task(name)
        shown = task.hint[: round(len(task.hint) * level * self.hint_step)]
        return replace(with_addition(task, f"{_INTRODUCTION}{shown}"), id=task_id) if level else task

    def metrics(self) -> Mapping[str, float]:
        """Return the number of hinted tasks in the last draw, and of failed tasks that wait."""
        return {"selector/hinted": self._hinted, "selector/failed": len(self._failed)}

    def state_dict(self) -> dict[str, Any]:
        """Return the order, and the failed tasks that wait."""
        return {**self._epochs.state_dict(), "failed": list(self._failed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. Raises UserError for that of other tasks or another seed."""
        self._epochs.load_state_dict(state)
        self._failed = list(state.get("failed", []))

    def _task(self, name: str) -> Task:
        return self.tasks[self._epochs.number_of(name)]


def with_addition(task: Task, text: str) -> Task:
    """Return the task with a text after its question.

    Raises:
        UserError: the prompt does not contain the question as it is written.
    """
    question = task.messages[-1]["content"].strip() if task.messages else ""
    place = task.prompt_text.rfind(question) if question else -1
    if place < 0:
        raise UserError(f"the prompt of {task.id} does not contain its question as written, so no hint can follow it")
    end = place + len(question)
    last: Message = {"role": task.messages[-1]["role"], "content": question + text}
    prompt = f"{task.prompt_text[:end]}{text}{task.prompt_text[end:]}"
    return replace(task, messages=(*task.messages[:-1], last), prompt_text=prompt)


def _read(task_id: str) -> tuple[str, int]:
    """Split the id of a drawn task into that of the task and the number of hints."""
    name, mark, level = task_id.rpartition(_MARK)
    return (name, int(level)) if mark and level.isdigit() else (task_id, 0)
