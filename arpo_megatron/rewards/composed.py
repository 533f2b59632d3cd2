"""A reward with the weighted terms that are added to it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from arpo_megatron.rewards.base import ResponseGroup, Reward, Score, Term
from arpo_megatron.rewards.judge.judge import Judge


@dataclass(frozen=True, slots=True)
class WeightedTerm:
    """A term with its weight and its name in the metrics."""

    name: str
    weight: float
    term: Term


@dataclass(frozen=True, slots=True)
class ComposedReward:
    """R = base + sum of weight * term; each product is a term of the score."""

    base: Reward
    """Scores the answers."""
    terms: tuple[WeightedTerm, ...] = ()
    """Computed from the scores of `base`, independently of each other."""
    judge: Judge | None = None
    """The judge of `base` and terms, if one of them needs it."""

    @property
    def needs_judge(self) -> bool:
        """Whether the base or a term needs a judge; `judge` is then set."""
        return self.judge is not None

    def score_group(self, group: ResponseGroup) -> list[Score]:
        """Score each response with the base, and add the terms."""
        group = replace(group, judge=self.judge)
        scores = self.base.score_group(group)
        added = [[each.weight * value for value in each.term.values(group, scores)] for each in self.terms]
        return [
            self._with_terms(score, [values[index] for values in added]) if added else score
            for index, score in enumerate(scores)
        ]

    def _with_terms(self, score: Score, values: Sequence[float]) -> Score:
        terms = {each.name: value for each, value in zip(self.terms, values, strict=True)}
        return replace(score, reward=score.reward + sum(values), terms={**score.terms, **terms})
