"""PPO-clip: the loss of ARPO, GRPO, DAPO and REINFORCE++, which differ in its bounds and in the advantages."""

from dataclasses import dataclass

from arpo_megatron.algorithms.base import Factors, LossTokens


@dataclass(frozen=True, slots=True)
class Ppo:
    """Clipped objective (arXiv 1707.06347, eq. 7) with a bound of its own above (DAPO, arXiv 2503.14476, eq. 10).

    On the tree: L = -(pos * min(r, 1 + clip_high) + neg * min(max(r, 1 - clip_low), dual_clip)), the last bound (dual
    clip, arXiv 1912.09729, eq. 5) where it is wanted.

    Attributes:
        clip_low: lower bound of the ratio, as its distance to 1.
        clip_high: upper bound likewise.
        dual_clip: upper bound of the ratio for negative advantages; None: none.
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None

    def factors(self, tokens: LossTokens) -> Factors:
        """min(r, 1 + clip_high) and max(r, 1 - clip_low)."""
        ratio, low, high = tokens.ratio, 1 - self.clip_low, 1 + self.clip_high
        return Factors(
            gain=ratio.clamp(max=high),
            cost=ratio.clamp(min=low, max=self.dual_clip),
            cut_high=ratio > high,
            cut_low=ratio < low,
            cut_dual=None if self.dual_clip is None else ratio > self.dual_clip,
        )
