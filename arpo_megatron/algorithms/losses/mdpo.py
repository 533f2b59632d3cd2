"""Mirror descent: an objective linear in the ratio, limited by a divergence from the policy of the step."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from arpo_megatron.algorithms.base import Factors, LossTokens


@dataclass(frozen=True, slots=True)
class Mdpo:
    """L = -(pos + neg) * r + w / mirror_step * (r log r - r + 1) (on-policy MDPO, arXiv 2005.09814, eq. 5).

    The bracket estimates KL(new || old) at a token that the old policy has sampled: its mean is E[r log r] because E[r]
    = 1, and it is never negative. The paper takes the divergence over all actions of a state. Nothing is clipped.
    """

    mirror_step: Annotated[float, Field(gt=0)] = 10.0
    """t_k, the step size of mirror descent, constant here. The default is ours and not tuned: the authors' code lowers
    t_k linearly from 1 to 0 over several updates on the same data. A step here makes few updates
    (`algorithm.minibatches`), and 10 gives each of them more room."""

    def factors(self, tokens: LossTokens) -> Factors:
        """Return the ratio for both signs, and the divergence."""
        ratio = tokens.ratio
        return Factors(gain=ratio, cost=ratio, penalty=(ratio * ratio.log() - ratio + 1) / self.mirror_step)
