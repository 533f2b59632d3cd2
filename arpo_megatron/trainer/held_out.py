"""Success at the held-out tasks of a run while it trains: one trajectory each, scored as `arpo eval` does."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from arpo_megatron.config import JobConfig
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.utils.atomic import write_json


def evaluation_due(config: JobConfig, step: int) -> str | None:
    """The name of the evaluation that is due when `step` steps are done; None: there is none."""
    wanted = config.evaluation
    if step == 0:
        return "before" if wanted.before else None
    if step == config.train.steps:
        return "after" if wanted.after else None
    return f"step_{step}" if wanted.every and step % wanted.every == 0 else None


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """What one trajectory a held-out task has earned.

    Attributes:
        solved: task id -> whether it was solved; what could not be finished was not.
        rewards: task id -> reward, of those that were finished.
        tool_calls: how many calls ended with each status ("ok", "error", "timeout", "refused"): a tool service in
            trouble makes a policy look worse than it is.
    """

    solved: Mapping[str, bool]
    rewards: Mapping[str, float]
    tool_calls: Mapping[str, int]

    @classmethod
    def of(cls, tasks: Sequence[Task], scored: Sequence[ScoredTree], threshold: float) -> Self:
        """Of trees with one leaf each, grown for `tasks`; a task is solved where the accuracy exceeds `threshold`."""
        solved = {item.task.id: bool(item.accuracies[0] > threshold) for item in scored}
        rewards = {item.task.id: float(item.rewards[0]) for item in scored}
        tools = [segment.tool for item in scored for segment in item.tree.segments if segment.tool is not None]
        calls = Counter(tool.status for tool in tools)
        return cls({task.id: solved.get(task.id, False) for task in tasks}, rewards, dict(calls))

    @property
    def success(self) -> float:
        """Share of the tasks that were solved, in [0, 1]."""
        return sum(self.solved.values()) / max(1, len(self.solved))

    def write(self, directory: Path, step: int, totals: Mapping[str, float]) -> None:
        """Keep them, beside what the run had spent (`RunState.totals`) when `step` steps were done."""
        directory.mkdir(exist_ok=True)
        row = {"step": step, "totals": totals, "success": self.success, **asdict(self)}
        write_json(directory / f"step_{step:06d}.json", row)
