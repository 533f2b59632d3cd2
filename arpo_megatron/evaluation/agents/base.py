"""Interface between an evaluation and its agents: questions in, responses delivered one by one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from arpo_megatron.evaluation.questions import Question
from arpo_megatron.evaluation.response import Response
from arpo_megatron.tasks.base import Task


@dataclass(frozen=True, slots=True)
class PendingQuestion:
    """A question with its prompt, and the numbers of the attempts to make."""

    question: Question
    task: Task
    attempts: tuple[int, ...]


Deliver = Callable[[PendingQuestion, Mapping[int, Response]], None]
"""Queue responses to a question for scoring, by attempt number. Must be called from one thread."""


class Agent(Protocol):
    """An agent that answers questions. Its draws depend on the seed, the question and the attempt number only."""

    def answer(self, pending: Sequence[PendingQuestion], deliver: Deliver) -> None:
        """Make all attempts and deliver each as soon as it finishes, in any order. Return after the last one."""
