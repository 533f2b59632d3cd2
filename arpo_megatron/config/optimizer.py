"""AdamW through Megatron's optimizer."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, Decay, Fraction, NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """AdamW through Megatron's optimizer."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr_ratio: Fraction = 0.1
    """Final learning rate over `lr` (linear and cosine)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course after the warm-up."""
    warmup_fraction: Fraction = 0.0
    """Share of all updates in which the rate rises from 0."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled; not applied to norms and biases."""
    beta1: Decay = 0.9
    """First-moment decay."""
    beta2: Decay = 0.95
    """Second-moment decay."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    clip_grad: PositiveFloat = 1.0
    """Largest global gradient norm."""
    offload: bool = False
    """Keep moments and master weights in host memory and update them there (a GPU with the distributed optimizer)."""
    offload_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """With `offload`: of so large a share of the parameters; the others' stay on the GPU."""
