"""Mirror descent: the objective is linear in the ratio, and what holds it is the distance to the policy of the step."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from arpo_megatron.algorithms.base import Factors, LossTokens


@dataclass(frozen=True, slots=True)
class Mdpo:
    """L = -(pos + neg) * r + w / mirror_step * (r log r - r + 1) (on-policy MDPO, arXiv 2005.09814, eq. 5).

    The bracket estimates KL(new || old) at a token that the old policy has sampled: its mean is E[r log r], because
    E[r] = 1, and it is never negative. The paper has the divergence over all actions of a state. Nothing is clipped.

    Attributes:
        mirror_step: t_k, the step size of mirror descent, constant here. Its value is ours and not tuned: the authors'
            code lets t_k fall in a straight line from 1 to 0, with several updates on the same data; a step here makes
            few (`algorithm.minibatches`), and 10 leaves each of them more room.
    """

    mirror_step: Annotated[float, Field(gt=0)] = 10.0

    def factors(self, tokens: LossTokens) -> Factors:
        """The ratio for both signs, and the divergence."""
        ratio = tokens.ratio
        return Factors(gain=ratio, cost=ratio, penalty=(ratio * ratio.log() - ratio + 1) / self.mirror_step)
