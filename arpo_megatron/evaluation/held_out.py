"""Held-out tasks of a run as benchmark questions."""

from arpo_megatron.evaluation.benchmarks import HELD_OUT
from arpo_megatron.evaluation.questions import Question
from arpo_megatron.tasks.base import Task


def held_out_question(task: Task) -> Question:
    """A held-out task as a question of the benchmark "held_out"."""
    return Question(HELD_OUT, task.id, task.messages[-1]["content"], (task.ground_truth,))
