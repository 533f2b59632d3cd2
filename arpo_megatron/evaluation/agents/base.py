"""What an evaluation asks of whoever answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from arpo_megatron.evaluation.questions import Question
from arpo_megatron.evaluation.response import Response
from arpo_megatron.tasks.base import Task


@dataclass(frozen=True, slots=True)
class PendingQuestion:
    """A question as it is put, and the numbers of the attempts that are to be made at it."""

    question: Question
    task: Task
    attempts: tuple[int, ...]


Deliver = Callable[[PendingQuestion, Mapping[int, Response]], None]
"""Takes some attempts at a question, by number, and has them scored later; to be called from one thread."""


class Agent(Protocol):
    """Answers questions. What it draws follows from the seed, the question and the attempt's number alone."""

    def answer(self, wanted: Sequence[PendingQuestion], deliver: Deliver) -> None:
        """Make all attempts and deliver each as soon as it is there, in any order; returns behind the last."""
