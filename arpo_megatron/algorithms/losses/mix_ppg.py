"""Mix-PPG: PPO on trajectories of several policies, each token clipped around the policy of the step."""

from dataclasses import dataclass
from typing import ClassVar

from arpo_megatron.algorithms.base import BatchValue, LossBatch
from arpo_megatron.algorithms.losses.batch_tokens import BatchTokens


@dataclass(frozen=True, slots=True)
class MixPpg:
    """Mix-policy proximal policy gradient (ReMix, arXiv 2507.06892). Experimental: the formula comes from public notes
    on the paper.

        L = -sum w_i min(r A, clip(r, d - clip_low, d + clip_high) A), r = new / sampling, d = old / sampling

    The old policy is that of the step: a trajectory that it has sampled has d = 1, which gives PPO. An unknown sampling
    log-prob counts as the old one. For A < 0 the recipe's dual clip bounds r by d * dual_clip, which the notes do not
    mention. The paper's entropy bonus is `algorithm.entropy_coefficient`.
    """

    corrects_for_sampling: ClassVar[bool] = True
    clip_low: float
    """Lower bound of the ratio, as its distance to d."""
    clip_high: float
    """Upper bound of the ratio, as its distance to d."""
    dual_clip: float | None
    """Upper bound of the ratio over d for negative advantages; None: no bound."""

    def value(self, batch: LossBatch) -> BatchValue:
        """Return the loss and the coefficient of every token."""
        tokens = BatchTokens.of(batch)
        low, high = tokens.mismatch - self.clip_low, tokens.mismatch + self.clip_high
        most = None if self.dual_clip is None else self.dual_clip * tokens.mismatch
        return tokens.clipped(low, high, most, tokens.ratio * tokens.mismatch)
