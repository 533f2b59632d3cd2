"""Entropy control: good samples count as if they had been drawn at a temperature that moves entropy to a target."""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.base import BatchValue, LossBatch
from arpo_megatron.algorithms.importance import bounded_exp
from arpo_megatron.algorithms.losses.batch_tokens import BatchTokens, concatenate
from arpo_megatron.algorithms.types import Floats

Temperature = Annotated[float, Field(gt=0)]
GOOD = 0.05
"""A trajectory is good if its advantage exceeds this, as in the released code."""


@dataclass(frozen=True, slots=True)
class EntropyTarget:
    """PPO-clip with the advantages (1 - a) A_i + a 1[A_i > 0.05] sg(p_T / p) (AEPO, arXiv 2510.08141, by its code).

    p is the step's policy and p_T the same at temperature T: `entropy_hot` if its mean entropy H is at most
    `entropy_target`, else `entropy_cold`. a = b / (1 + b) with b = min(|entropy_target - H|, `entropy_pull`) / share,
    share that of the good trajectories. So the second part is REINFORCE on good samples of p_T, weighted by
    importance: raising T raises entropy and the reverse. The paper samples those trajectories at temperature T; the
    released code has that (`AEPO`) and this variant, which reuses the step's own trajectories (`DCPO`). There good ones
    are those with a reward above 0.05; the criterion here is that of `AEPO`. H is the mean of the batch, with a
    shared token counted once; the code estimates it from the log-probs of the step before.
    """

    clip_low: float
    """Lower bound of the ratio, as its distance to 1."""
    clip_high: float
    """Upper bound of the ratio, as its distance to 1."""
    dual_clip: float | None
    """Upper bound of the ratio for negative advantages; None: no bound."""
    entropy_target: Annotated[float, Field(ge=0)] = 0.5
    """Target of the mean entropy, in nats; 0.5 in the released script."""
    entropy_hot: Temperature = 1.2
    """T below the target, as a multiple of the sampling temperature."""
    entropy_cold: Temperature = 0.8
    """T above the target, as a multiple of the sampling temperature."""
    entropy_pull: Annotated[float, Field(ge=0)] = 0.1
    """Largest |entropy_target - H| that counts."""

    def temperature(self, entropy: float) -> float:
        """Return T as a multiple of the sampling temperature, given the mean entropy in nats."""
        return self.entropy_hot if entropy <= self.entropy_target else self.entropy_cold

    def value(self, batch: LossBatch) -> BatchValue:
        """Return the loss and the coefficient of every token."""
        tokens = BatchTokens.of(batch)
        good = [
            shape.on_path * (shape.model_lengths > 0) * ((own if own.ndim == 2 else own[:, None]) > GOOD)
            for shape, own in zip(tokens.shapes, batch.advantages, strict=True)
        ]
        share = self._mix(batch, good)
        factor = bounded_exp(np.nan_to_num(concatenate(batch.tempered_logprobs) - concatenate(batch.old_logprobs)))
        tempered = share * factor * BatchTokens.of(batch, good).positive
        mixed = replace(
            tokens, positive=(1 - share) * tokens.positive + tempered, negative=(1 - share) * tokens.negative
        )
        return mixed.clipped(1 - self.clip_low, 1 + self.clip_high, self.dual_clip, mixed.ratio)

    def _mix(self, batch: LossBatch, good: list[Floats]) -> float:
        """Return a, given the good segments of each trajectory; 0 without any."""
        entropies = concatenate(batch.entropies)
        known = entropies[~np.isnan(entropies)]
        rows = concatenate([own.any(1) for own in good])
        if not len(known) or not rows.any():
            return 0.0
        pull = min(abs(self.entropy_target - float(known.mean())), self.entropy_pull) / float(rows.mean())
        return pull / (1 + pull)
