"""CISPO: the importance weight is clipped instead of the gradient, so every token keeps one."""

from dataclasses import dataclass

from arpo_megatron.algorithms.base import Factors, LossTokens


@dataclass(frozen=True, slots=True)
class Cispo:
    """Clipped importance sampling policy optimization (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5).

    L = -(pos + neg) * sg(min(max(r, 1 - clip_low), 1 + clip_high)) * logprob, token-mean. The paper sets no lower bound
    (clip_low=1 here) and does not publish its tuned upper bound. The preset's clip_high=5 is ours: weights up to 6, the
    loosest limit of public CISPO recipes (4 to 6).
    """

    clip_low: float
    """Lower bound of the importance weight, as its distance to 1."""
    clip_high: float
    """Upper bound of the importance weight, as its distance to 1."""

    def factors(self, tokens: LossTokens) -> Factors:
        """Return the same factor for both signs."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        term = tokens.ratio.detach().clamp(min=low, max=high) * tokens.logprobs
        return Factors(gain=term, cost=term, clipped_high=tokens.ratio > high, clipped_low=tokens.ratio < low)
