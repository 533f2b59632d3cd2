"""The weights to start from, and their number format."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import (
    STRICT,
    Fp8Recipe,
    NonNegative,
    NonNegativeFloat,
    Positive,
)


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """Which weights to start from, and in which number format to train them."""

    path: Path | None = None
    """Hugging Face directory to start from. None, and no `hub_id`: a tiny random model is made, and its tokenizer."""
    hub_id: str | None = None
    """Hugging Face id of the model that belongs at `path`: what has to be fetched, and how `arpo plan` knows the sizes
    before it is. A directory with a model of other sizes is refused."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations of the trainer and of the engine."""
    fp8: Fp8Recipe = "none"
    """Matrix products of the trainer's layers in FP8 (Hopper GPU, transformer-engine, bfloat16); named after what a
    scale comes from: `delayed` the tensor's earlier values (so that ratios before any update are only nearly 1),
    `current` the tensor, `blockwise` 128 features of one token."""
    bf16_edge_layers: NonNegative = 0
    """With fp8 `current` or `blockwise`: this many first and as many last layers keep bfloat16 products."""
    hidden_size: Positive = 128
    """Width of the made model (used when there is neither `path` nor `hub_id`, like the next five)."""
    layers: Positive = 4
    """Transformer layers of the made model."""
    heads: Positive = 4
    """Query heads of the made model."""
    kv_heads: Positive = 4
    """Key/value heads of the made model."""
    ffn_size: Positive = 384
    """Width of the made model's gated MLP."""
    vocabulary_size: Positive = 2048
    """Largest vocabulary of a tokenizer trained on the data (byte-level BPE; the generated tasks need fewer)."""
    router_aux_loss: NonNegativeFloat | Literal["model"] = 0.0
    """Coefficient of the loss that levels the load of a mixture's experts, counted over trajectories; a level load has
    a loss of 1 a layer. 0, usual in reinforcement learning: none. `model`: its config.json's `router_aux_loss_coef`."""
    max_length: Annotated[int, Field(ge=64)] = 2048
    """Longest trajectory in tokens: prompt, model and tool tokens together."""

    @property
    def is_generated(self) -> bool:
        """Whether the job makes its model on the spot."""
        return self.path is None and self.hub_id is None
