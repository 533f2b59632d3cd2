"""Metrics, W&B and profiles."""

from typing import Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class MonitorConfig:
    """Where metrics go besides the run directory's JSONL file and the terminal."""

    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode."""
    wandb_project: str = "arpo-megatron"
    """Project there."""
    peak_tflops: PositiveFloat | None = None
    """What a rank's device can do at most, in TFLOP/s of the training format (H100 bfloat16: 989); for MFU."""
    profile_steps: tuple[Positive, Positive] | None = None
    """First and last step (update, in a cold start) whose passes over packs are traced with torch's profiler."""
    profile_ranks: Literal["first", "all"] = "first"
    """Which trainer ranks write a trace; one of a large model takes hundreds of MB."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(f"monitor.profile_steps={list(self.profile_steps)}: the last step is before the first")
        return self
