"""AEPO's loss: what the upper bound clips keeps a gradient of bounded size."""

from dataclasses import dataclass, replace

from arpo_megatron.algorithms.base import Factors, LossTokens
from arpo_megatron.algorithms.losses.ppo import Ppo


@dataclass(frozen=True, slots=True)
class Aepo(Ppo):
    """Entropy clipping-balanced loss (arXiv 2510.14545, section 3.3).

    PPO-clip, but where A > 0 and r > 1 + clip_high the ratio counts as (1 + clip_high) / sg(r) * r: its value is the
    bound, its gradient (1 + clip_high) * grad logprob instead of none. Where A < 0 it is PPO's, dual clip included.
    """

    def factors(self, tokens: LossTokens) -> Factors:
        """The rescaled ratio, and PPO's."""
        scale = ((1 + self.clip_high) / tokens.ratio.detach()).clamp(max=1.0)
        # Not super(): a class with slots is made anew by the decorator, and the method would look for the first one.
        return replace(Ppo.factors(self, tokens), gain=tokens.ratio * scale)
