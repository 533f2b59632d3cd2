"""Section `sft`: the cold start, supervised training on demonstrations or conversations."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import (
    STRICT,
    Fraction,
    NonNegative,
    Positive,
)
from arpo_megatron.config.optimizer import OptimizerConfig


@dataclass(frozen=True, config=STRICT)
class SftConfig:
    """Supervised training on demonstrations or conversations, before the ARPO loop."""

    steps: NonNegative = 0
    """Number of updates; 0 skips the cold start."""
    data: Path | None = None
    """Conversations to learn from (.jsonl, .json or .parquet, rows with "messages"), for a model at model.path, or rows
    that `arpo trees RUN --reflections FILE` has written; None: demonstrations of the generated tasks."""
    max_tokens: Positive | None = None
    """A conversation with more tokens is a bad row (`data`); None: model.max_length."""
    held_out_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the conversations kept for the evaluation loss (`data`)."""
    evaluate_every: Positive = 50
    """Updates between two measurements of that loss; one more follows the last update."""
    batch: Positive = 64
    """Demonstrations or conversations per update."""
    mistake_share: Fraction = 0.4
    """Share of generated demonstrations with a mistake (wrong operator, misspelt name, ignored result; in `trails` a
    page too few or too many, a wrong addend, an ignored result)."""
    save_every: Positive = 100
    """Updates between checkpoints."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=7e-6, schedule="cosine", warmup_fraction=0.1)
    """Learning rate and schedule of the cold start."""
