"""CISPO: the importance weight is clipped, not the gradient, so that every token keeps one."""

from dataclasses import dataclass

from arpo_megatron.algorithms.base import Factors, LossTokens


@dataclass(frozen=True, slots=True)
class Cispo:
    """Clipped importance sampling policy optimization (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5).

    L = -(pos + neg) * sg(min(max(r, 1 - clip_low), 1 + clip_high)) * logprob, token-mean. The paper sets no lower
    bound (clip_low=1 here) and tunes the upper one without telling it. The preset's clip_high=5 is ours: weights up to
    6, the loosest of the limits that public recipes for CISPO set (4 to 6).

    Attributes:
        clip_low: lower bound of the importance weight, as its distance to 1.
        clip_high: upper bound likewise.
    """

    clip_low: float
    clip_high: float

    def factors(self, tokens: LossTokens) -> Factors:
        """Both signs have the same factor."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        term = tokens.ratio.detach().clamp(min=low, max=high) * tokens.logprobs
        return Factors(gain=term, cost=term, cut_high=tokens.ratio > high, cut_low=tokens.ratio < low)
