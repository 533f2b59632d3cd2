"""Two agents that check the scorers: one always answers correctly and must score 1, one never and must score 0."""

from collections.abc import Sequence
from dataclasses import dataclass

from arpo_megatron.evaluation.agents.base import Deliver, PendingQuestion
from arpo_megatron.evaluation.questions import Question
from arpo_megatron.evaluation.response import AgentResponse
from arpo_megatron.rewards.math.verify import math_equal
from arpo_megatron.rewards.qa import token_f1
from arpo_megatron.tree import Finish

NONSENSE = "qzxqv"
"""A text that shares no word with any answer."""


@dataclass(frozen=True, slots=True)
class OracleAgent:
    """Answers with the first accepted answer, or with a wrong one."""

    correct: bool

    def answer(self, pending: Sequence[PendingQuestion], deliver: Deliver) -> None:
        """Deliver the same response for every attempt at a question."""
        for each in pending:
            answer = each.question.answers[0] if self.correct else wrong_answer(each.question)
            text = f"<think>Oracle.</think><answer>\\boxed{{{answer}}}</answer>"
            deliver(each, dict.fromkeys(each.attempts, AgentResponse(text, text, Finish.END)))


def wrong_answer(question: Question) -> str:
    """Return the next integer that is not accepted if the answer is an integer, and a nonsense word otherwise."""
    text = question.answers[0].strip().replace(",", "")
    if not text.removeprefix("-").isdecimal():
        return NONSENSE
    wrong = int(text) + 1
    while any(token_f1(str(wrong), each) > 0 or math_equal(str(wrong), each) for each in question.answers):
        wrong += 1
    return str(wrong)
