"""Two agents that prove the scorers: one knows every answer and must score 1, one none and must score 0."""

from collections.abc import Sequence
from dataclasses import dataclass

from arpo_megatron.evaluation.agents.base import Deliver, PendingQuestion
from arpo_megatron.evaluation.questions import Question
from arpo_megatron.evaluation.response import AgentResponse
from arpo_megatron.rewards.math.verify import math_equal
from arpo_megatron.rewards.qa import token_f1
from arpo_megatron.tree import Finish

NONSENSE = "qzxqv"
"""No answer to anything, and no word of one."""


@dataclass(frozen=True, slots=True)
class OracleAgent:
    """Gives the first accepted answer of every question, or where it is not `right` a wrong one."""

    right: bool

    def answer(self, wanted: Sequence[PendingQuestion], deliver: Deliver) -> None:
        """As the protocol says."""
        for each in wanted:
            text = each.question.answers[0] if self.right else wrong_answer(each.question)
            said = f"<think>I was told.</think><answer>\\boxed{{{text}}}</answer>"
            response = AgentResponse(said, said, Finish.END)
            deliver(each, dict.fromkeys(each.attempts, response))


def wrong_answer(question: Question) -> str:
    """The next integer that is not accepted where the answer is one (a number is then compared with a number), else a
    word of nonsense.
    """
    text = question.answers[0].strip().replace(",", "")
    if not text.removeprefix("-").isdecimal():
        return NONSENSE
    wrong = int(text) + 1
    while any(token_f1(str(wrong), each) > 0 or math_equal(str(wrong), each) for each in question.answers):
        wrong += 1
    return str(wrong)
