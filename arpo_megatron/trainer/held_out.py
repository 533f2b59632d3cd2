"""Success at the held-out tasks while a run trains: one trajectory each, scored as `arpo eval` scores it."""

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
    """Return the name of the evaluation that is due after `step` steps, if any."""
    evaluation = config.evaluation
    if step == 0:
        return "before" if evaluation.before else None
    if step == config.train.steps:
        return "after" if evaluation.after else None
    return f"step_{step}" if evaluation.every and step % evaluation.every == 0 else None


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """Success and reward of each held-out task in one evaluation, and counts of tool calls."""

    solved: Mapping[str, bool]
    """Task id -> whether it was solved. A task that could not be finished was not."""
    rewards: Mapping[str, float]
    """Task id -> reward, for the tasks that were finished."""
    tool_calls: Mapping[str, int]
    """Calls by status ("ok", "error", "timeout", "refused", "invalid_call"): a tool service in trouble makes a policy
    look worse."""

    @classmethod
    def from_trees(cls, tasks: Sequence[Task], scored: Sequence[ScoredTree], threshold: float) -> Self:
        """Summarize trees of one leaf each, grown for `tasks`; an accuracy above `threshold` solves its task."""
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
        """Write the result of `step` steps as JSON, with what the run had spent by then (`RunState.totals`)."""
        directory.mkdir(exist_ok=True)
        row = {"step": step, "totals": totals, "success": self.success, **asdict(self)}
        write_json(directory / f"step_{step:06d}.json", row)
