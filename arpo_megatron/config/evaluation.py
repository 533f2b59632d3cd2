"""Held-out evaluation through the engine and the sandbox."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, NonNegative, NonNegativeFloat, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class EvalConfig:
    """Held-out evaluation through the engine and the sandbox."""

    tasks: Positive = 200
    """Held-out tasks, one trajectory each."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling."""
    top_k: NonNegative = 0
    """Only so many of the most likely tokens are drawn from; 0: all."""
    repetition_penalty: PositiveFloat = 1.0
    """Logits of tokens that the engine has sampled in the same turn are divided by it (multiplied where negative). Not
    with temperature 0: SGLang counts a token as sampled one step late at times, so greedy answers would differ."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    every: Positive | None = None
    """Evaluate after every n-th step too; None: not in between."""

    @property
    def penalty(self) -> float:
        """`repetition_penalty`, or 1 where sampling is greedy."""
        return self.repetition_penalty if self.temperature > 0 else 1.0
