"""Section `monitor`: metrics, Weights & Biases and profiles."""

from typing import Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, NonNegative, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class MonitorConfig:
    """Outputs of metrics besides the run directory's JSONL file and the terminal, and profiles."""

    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Mode of Weights & Biases."""
    wandb_project: str = "arpo-megatron"
    """Project in Weights & Biases."""
    wandb_entity: str | None = None
    """Team or user of the project; None: the default of the login."""
    wandb_group: str | None = None
    """Group of the run."""
    wandb_tags: tuple[str, ...] = ()
    """Tags of the run."""
    wandb_notes: str | None = None
    """Text about the run."""
    wandb_samples: NonNegative = 8
    """Trajectories in the table `samples` of Weights & Biases, after each step that saves a checkpoint."""
    tensorboard: bool = False
    """Write TensorBoard event files to RUN_DIR/tensorboard."""
    webhook_variable: str | None = None
    """Environment variable with an address. The job posts JSON there when it ends, fails, stalls, is stopped, or skips
    an update that is not finite."""
    peak_tflops: PositiveFloat | None = None
    """Peak of a rank's device in TFLOP/s of the training format (H100 bfloat16: 989); needed for MFU."""
    profile_steps: tuple[Positive, Positive] | None = None
    """First and last step (update, in a cold start) that torch's profiler traces."""
    profile_ranks: Literal["first", "all"] = "first"
    """Which trainer ranks write a trace; a trace of a large model takes hundreds of MB."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(f"monitor.profile_steps={list(self.profile_steps)}: the last step is before the first")
        return self
