"""AEPO's loss: tokens beyond the upper clip keep a gradient of bounded size."""

from dataclasses import dataclass, replace

from arpo_megatron.algorithms.base import Factors, LossTokens
from arpo_megatron.algorithms.losses.ppo import Ppo


@dataclass(frozen=True, slots=True)
class Aepo(Ppo):
    """Entropy clipping-balanced loss (AEPO, arXiv 2510.14545, section 3.3).

    PPO-clip, but if A > 0 and r > 1 + clip_high the ratio is (1 + clip_high) / sg(r) * r: its value is the bound and
    its gradient (1 + clip_high) * grad logprob instead of none. For A < 0 the loss is PPO's, dual clip included.
    """

    def factors(self, tokens: LossTokens) -> Factors:
        """Return PPO's factors with the rescaled ratio."""
        scale = ((1 + self.clip_high) / tokens.ratio.detach()).clamp(max=1.0)
        # Not super(): the dataclass decorator replaces a class with slots, and super() would refer to the replaced one.
        return replace(Ppo.factors(self, tokens), gain=tokens.ratio * scale)
