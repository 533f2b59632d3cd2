"""Optimizer, cold start, the loop, and what it tells."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, Decay, Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat


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


@dataclass(frozen=True, config=STRICT)
class SftConfig:
    """The cold start: supervised training on demonstrations."""

    steps: NonNegative = 0
    """Updates; 0 skips the cold start."""
    data: Path | None = None
    """Conversations to learn from (.jsonl, .json or .parquet, rows with "messages"), for a model at model.path; None:
    demonstrations of the generated tasks."""
    max_tokens: Positive | None = None
    """A conversation of more tokens is a bad row (`data`); None: model.max_length."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the conversations that are kept for the evaluation loss (`data`)."""
    evaluate_every: Positive = 50
    """Updates between two measurements of that loss; one comes after the last update."""
    batch: Positive = 64
    """Demonstrations or conversations an update."""
    careless: Fraction = 0.4
    """Share of made demonstrations with a careless act (wrong operator, misspelt name, result ignored; in `trails` a
    page too few or too many, another addend, result ignored)."""
    save_every: Positive = 100
    """Updates between checkpoints."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=7e-6, schedule="cosine", warmup_fraction=0.1)
    """Its own learning rate and schedule."""


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """The ARPO loop."""

    steps: Positive = 100
    """Rollout-and-update rounds."""
    tasks_per_step: Positive = 16
    """Tasks whose trees are grown in one step."""
    token_budget: Positive = 8192
    """Tokens of one pack, the unit of a forward and backward pass."""
    save_every: Positive = 1
    """Steps between checkpoints."""
    keep_checkpoints: Positive = 2
    """Newest whole checkpoints kept; older ones are deleted."""
    keep_every: NonNegative = 0
    """Checkpoints of every n-th step are kept for good; 0: none."""
    logprob_gap_limit: PositiveFloat | None = None
    """Largest |trainer - engine| log-prob of a probe, in nats, that a weight push may leave; larger stops the run.
    None: 1e-3 in float32, 0.2 in bfloat16, whose activations carry 8 bits, 0.5 with FP8 in trainer or engine."""


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
    profile_ranks: Literal["leader", "all"] = "leader"
    """Which trainer ranks write a trace; one of a large model takes hundreds of MB."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(f"monitor.profile_steps={list(self.profile_steps)}: the last step is before the first")
        return self
