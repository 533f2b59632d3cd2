"""What held-out tasks come to, one trajectory each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arpo_megatron.rewards.base import Reward, score_tree
from arpo_megatron.rollout.messages import GrowReport
from arpo_megatron.tasks.base import Task


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Shares of all tasks, in [0, 1]: what could not be answered counts as wrong.

    Attributes:
        tasks: their number.
        not_answered: how many could not be.
        success: share whose accuracy exceeds the threshold.
        accuracy: mean.
        format_ok: share that keeps to the tag protocol.
        tool_calls: executed.
    """

    tasks: int
    not_answered: int
    success: float
    accuracy: float
    format_ok: float
    tool_calls: int


def evaluation_of(
    report: GrowReport, tasks: Sequence[Task], reward: Reward, decode: Callable[[Sequence[int]], str], threshold: float
) -> Evaluation:
    """Score the trees that were grown for these tasks."""
    by_id, count = {task.id: task for task in tasks}, max(1, len(tasks))
    scores = [score_tree(reward, tree, by_id[tree.task_id], decode)[0] for tree in report.trees]
    return Evaluation(
        tasks=len(tasks),
        not_answered=len(report.failed),
        success=sum(score.accuracy > threshold for score in scores) / count,
        accuracy=sum(score.accuracy for score in scores) / count,
        format_ok=sum(score.format_ok for score in scores) / count,
        tool_calls=report.stats.counts.calls_executed,
    )
