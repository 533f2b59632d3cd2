"""Section `optimizer`: AdamW and its learning-rate schedule."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, Decay, Fraction, NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """AdamW in Megatron's optimizer: learning rate, decay, clipping and offload."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr_ratio: Fraction = 0.1
    """Final learning rate over `lr` (linear and cosine)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_fraction: Fraction = 0.0
    """Share of all updates in which the rate rises from 0."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; not applied to norms and biases."""
    beta1: Decay = 0.9
    """Decay of the first moment."""
    beta2: Decay = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Constant added to the denominator."""
    clip_grad: PositiveFloat = 1.0
    """Largest global gradient norm."""
    offload: bool = False
    """Keep moments and master weights in host memory and update them there (on a GPU with the distributed optimizer).
    """
    offload_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """With `offload`: share of the parameters that is offloaded; the rest stays on the GPU."""
