"""PPO-clip: the loss of ARPO, GRPO, DAPO and REINFORCE++, which differ in bounds and advantages."""

from dataclasses import dataclass

from arpo_megatron.algorithms.base import Factors, LossTokens


@dataclass(frozen=True, slots=True)
class Ppo:
    """The clipped objective (PPO, arXiv 1707.06347, eq. 7) with a separate upper bound (DAPO, arXiv 2503.14476, eq.
    10).

    On the tree: L = -(pos * min(r, 1 + clip_high) + neg * min(max(r, 1 - clip_low), dual_clip)). The last bound is the
    dual clip (arXiv 1912.09729, eq. 5), which is optional.
    """

    clip_low: float
    """Lower bound of the ratio, as its distance to 1."""
    clip_high: float
    """Upper bound of the ratio, as its distance to 1."""
    dual_clip: float | None
    """Upper bound of the ratio for negative advantages; None: no bound."""

    def factors(self, tokens: LossTokens) -> Factors:
        """Return min(r, 1 + clip_high) and max(r, 1 - clip_low), bounded by the dual clip."""
        ratio, low, high = tokens.ratio, 1 - self.clip_low, 1 + self.clip_high
        return Factors(
            gain=ratio.clamp(max=high),
            cost=ratio.clamp(min=low, max=self.dual_clip),
            clipped_high=ratio > high,
            clipped_low=ratio < low,
            clipped_dual=None if self.dual_clip is None else ratio > self.dual_clip,
        )
