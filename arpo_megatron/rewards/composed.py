"""A reward and the weighted terms that are added to it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from arpo_megatron.rewards.base import ResponseGroup, Reward, Score, Term
from arpo_megatron.rewards.judge.judge import Judge


@dataclass(frozen=True, slots=True)
class WeightedTerm:
    """A term under the name that its part of the reward has in the log."""

    name: str
    weight: float
    term: Term


@dataclass(frozen=True, slots=True)
class ComposedReward:
    """R = base + sum of weight * term; each product is a part of the score.

    Attributes:
        base: scores answers.
        terms: are computed from what `base` says, whatever their order.
        judge: for `base` and terms that ask one.
    """

    base: Reward
    terms: tuple[WeightedTerm, ...] = ()
    judge: Judge | None = None

    @property
    def needs_judge(self) -> bool:
        """Whether the base or a term asks one; it is here already."""
        return self.judge is not None

    def score_group(self, group: ResponseGroup) -> list[Score]:
        """The base's score of each response with the terms added."""
        group = replace(group, judge=self.judge)
        scores = self.base.score_group(group)
        added = [[each.weight * value for value in each.term.values(group, scores)] for each in self.terms]
        return [
            self._with_terms(score, [values[index] for values in added]) if added else score
            for index, score in enumerate(scores)
        ]

    def _with_terms(self, score: Score, values: Sequence[float]) -> Score:
        parts = {each.name: value for each, value in zip(self.terms, values, strict=True)}
        return replace(score, reward=score.reward + sum(values), terms={**score.terms, **parts})
