"""FAPO: a right answer reached by wrong steps earns less."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arpo_megatron.rewards.base import ResponseGroup, Score
from arpo_megatron.rewards.judge.prompts import FLAWED, flaw_question, reference, user_question


@dataclass(frozen=True, slots=True)
class FlawedPositive:
    """-1 if the answer is right and a judge calls the way to it flawed, else 0.

    FAPO (arXiv 2510.22543, eq. 8). The paper subtracts lambda = 1 from rewards of 1 and -1, which puts a flawed right
    answer half-way between right and wrong. With rewards of 1 and 0 that is weight 0.5. The delay needs no schedule:
    normalised in its group such an answer beats wrong ones while they are the majority, and loses to sound ones once
    those are. If a verdict of a group is missing because the judge is down, the term is 0 for the whole group.

    Experimental: the formula comes from the paper's abstract and reviews, not from the paper or its authors' code.
    """

    needs_judge: ClassVar[bool] = True

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> list[float]:
        """Return a value for each response."""
        assert group.judge is not None
        question, truth = user_question(group.task), reference(group.task)
        right = [index for index, score in enumerate(scores) if score.accuracy > 0.5]
        verdicts = group.judge.ask([flaw_question(question, truth, group.responses[index].text) for index in right])
        values = [0.0] * len(scores)
        if None not in verdicts:
            for index, verdict in zip(right, verdicts, strict=True):
                values[index] = -float(verdict == FLAWED)
        return values
