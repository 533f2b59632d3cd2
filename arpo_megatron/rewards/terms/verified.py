"""DeepTravel: a right answer counts only if two checks of its trajectory agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arpo_megatron.rewards.base import ResponseGroup, Score
from arpo_megatron.rewards.judge.prompts import (
    CONSISTENT,
    SATISFIED,
    consistency_question,
    requirements_question,
    user_question,
)


@dataclass(frozen=True, slots=True)
class VerifiedAnswer:
    """-accuracy unless a judge finds that the answer meets the question, and that the tools' results support it.

    DeepTravel (arXiv 2509.21842): a verifier of the trajectory filters answers first; only what passes reaches the
    verifier of the turns, which compares details with the tools' responses. So with weight 1 an answer earns its
    accuracy if both agree, else 0. Its rubrics are not public; both questions are ours, and the second is one for all
    turns. If a verdict of a group is missing because the judge is down, the term is 0 for the whole group.

    Experimental: the formula comes from the paper's abstract, not from the paper or its authors' code.
    """

    needs_judge: ClassVar[bool] = True

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> list[float]:
        """Return a value for each response."""
        assert group.judge is not None
        question, texts = user_question(group.task), [response.text for response in group.responses]
        values = [-max(0.0, score.accuracy) for score in scores]
        open_ = [index for index, value in enumerate(values) if value < 0]
        checks = ((requirements_question, SATISFIED), (consistency_question, CONSISTENT))
        for ask, passed in checks:
            verdicts = group.judge.ask([ask(question, texts[index]) for index in open_])
            if None in verdicts:
                return [0.0] * len(scores)
            open_ = [index for index, verdict in zip(open_, verdicts, strict=True) if verdict == passed]
        for index in open_:
            values[index] = 0.0
        return values
