"""OPMD: a policy gradient without ratio, whose step is shortened by a regulariser."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from arpo_megatron.algorithms.base import Factors, LossTokens


@dataclass(frozen=True, slots=True)
class Opmd:
    """L = -(pos + neg) * logprob / (1 + opmd_tau) (R3L, arXiv 2601.03715, by its released code, `opmd_policy_loss.py`).

    Online policy mirror descent in the form of that code: the regulariser towards the present policy only scales the
    gradient. There is no ratio and no clip, so older tokens need `algorithm.sampling_correction`.
    """

    opmd_tau: Annotated[float, Field(ge=0)] = 1.0
    """tau, strength of the regulariser."""

    def factors(self, tokens: LossTokens) -> Factors:
        """Return the same factor for both signs."""
        term = tokens.logprobs / (1 + self.opmd_tau)
        return Factors(gain=term, cost=term)
