"""SPO: the share of its group that a trajectory beats."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

from arpo_megatron.rewards.base import ResponseGroup, Score
from arpo_megatron.rewards.judge.prompts import FIRST, SECOND, preference_question, user_question

_WON = {FIRST: (1.0, 0.0), SECOND: (0.0, 1.0)}


@dataclass(frozen=True, slots=True)
class ShareOfWins:
    """Mean over the group's other trajectories of 1 if a judge prefers this one, 0 if the other, 1/2 if neither.

    SPO (self-play preference optimization, arXiv 2401.04056, algorithm 2). Every pair is asked about in both orders,
    because judges favour the first: G * (G - 1) questions per group. If a verdict of a group is missing because the
    judge is down, the term is 0 for the whole group.

    Experimental: the formula comes from the paper's abstract and reviews, not from the paper or its authors' code.
    """

    needs_judge: ClassVar[bool] = True

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> list[float]:
        """Return a value for each response."""
        assert group.judge is not None
        question, texts = user_question(group.task), [response.text for response in group.responses]
        wins, count = [0.0] * len(texts), len(texts)
        pairs = [(i, j) for i, j in permutations(range(count), 2) if texts[i] != texts[j]]
        verdicts = group.judge.ask([preference_question(question, texts[i], texts[j]) for i, j in pairs])
        if count < 2 or None in verdicts:
            return wins
        for (i, j), verdict in zip(pairs, verdicts, strict=True):
            first, second = _WON.get(str(verdict), (0.5, 0.5))
            wins[i] += first / 2
            wins[j] += second / 2
        same = [sum(text == other for other in texts) - 1 for text in texts]  # beat each other half of the time
        return [(won + ties / 2) / (count - 1) for won, ties in zip(wins, same, strict=True)]
