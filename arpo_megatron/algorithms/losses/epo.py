"""EPO: an entropy bonus, with a penalty outside a corridor around the entropy of earlier steps."""

from dataclasses import dataclass, replace
from math import exp
from typing import Annotated

from pydantic import Field

from arpo_megatron.algorithms.base import Factors, LossTokens
from arpo_megatron.algorithms.losses.ppo import Ppo

Positive = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Epo:
    """PPO-clip plus w * epo_weight * (beta_k * epo_smoothing * P_t - H_t) (EPO, arXiv 2509.22576, eq. 2 to 6).

    P_t = max(0, epo_low * M - H_t) + max(0, H_t - epo_high * M), with M the mean over the finished steps of their mean
    entropies; P_t = 0 in the first step. beta_k = 1 + exp(-epo_decay * k / floor(K / 2)) in step k of K. The paper
    averages over the tokens of a turn, turns, and trajectories; here `loss_aggregation` sets the weights of tokens. M
    counts a token that trajectories share once. `arpo recompute-update` repeats a skipped update as if it were in the
    first step.
    """

    clip_low: float
    """Lower bound of the ratio, as its distance to 1."""
    clip_high: float
    """Upper bound of the ratio, as its distance to 1."""
    dual_clip: float | None
    """Upper bound of the ratio for negative advantages; None: no bound."""
    epo_weight: Positive = 0.001
    """lambda; the default is ours."""
    epo_smoothing: Positive = 0.1
    """alpha."""
    epo_low: Positive = 0.5
    """kappa_l."""
    epo_high: Positive = 1.5
    """kappa_r."""
    epo_decay: Positive = 1.0
    """gamma; the default is ours."""

    def factors(self, tokens: LossTokens) -> Factors:
        """Return PPO's factors, and the penalty."""
        entropies, progress = tokens.entropies, tokens.progress
        penalty = -self.epo_weight * entropies
        if progress.entropy is not None:
            outside = (self.epo_low * progress.entropy - entropies).clamp(min=0.0)
            outside = outside + (entropies - self.epo_high * progress.entropy).clamp(min=0.0)
            beta = 1 + exp(-self.epo_decay * progress.step / max(1, progress.steps // 2))
            penalty = penalty + self.epo_weight * beta * self.epo_smoothing * outside
        plain = Ppo(self.clip_low, self.clip_high, self.dual_clip).factors(tokens)
        return replace(plain, penalty=penalty)
