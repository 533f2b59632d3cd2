"""Mix-PPG: PPO on trajectories of several policies, each token held near the step's policy, not near its own."""

from dataclasses import dataclass
from typing import ClassVar

from arpo_megatron.algorithms.base import Batch, MinibatchValue
from arpo_megatron.algorithms.losses.batch_tokens import BatchTokens


@dataclass(frozen=True, slots=True)
class MixPpg:
    """Mix-policy proximal policy gradient (ReMix, arXiv 2507.06892; the formula as public notes on it quote it).

    L = -sum w_i min(r A, clip(r, d - clip_low, d + clip_high) A), r = new / sampling, d = old / sampling

    with the policy of the step as old: a trajectory that the step's own policy has sampled has d = 1, which is PPO. A
    sampling log-prob that is unknown counts as the old one. For A < 0 the recipe's dual clip bounds r by d * dual_clip,
    which the notes do not mention. The paper's entropy bonus is `algorithm.entropy_coefficient`.

    Attributes:
        clip_low: lower bound of the ratio, as its distance to d.
        clip_high: upper bound likewise.
        dual_clip: upper bound of the ratio over d for negative advantages; None: none.
    """

    corrects_for_sampling: ClassVar[bool] = True
    clip_low: float
    clip_high: float
    dual_clip: float | None

    def value(self, batch: Batch) -> MinibatchValue:
        """The loss and the coefficient of every token."""
        tokens = BatchTokens.of(batch)
        low, high = tokens.mismatch - self.clip_low, tokens.mismatch + self.clip_high
        most = None if self.dual_clip is None else self.dual_clip * tokens.mismatch
        return tokens.clipped(low, high, most, tokens.ratio * tokens.mismatch)
