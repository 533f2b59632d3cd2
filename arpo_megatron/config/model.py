"""Section `model`: the initial weights and their number format."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import (
    STRICT,
    AttentionBackend,
    Fp8Recipe,
    NonNegative,
    NonNegativeFloat,
    Positive,
)


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The initial weights, and the number format of training."""

    path: Path | None = None
    """Hugging Face directory of the initial weights. None, and no `hub_id`: the job generates a tiny random model and
    its tokenizer."""
    hub_id: str | None = None
    """Hugging Face id of the model that belongs at `path`: what to download, and where `arpo plan` gets the sizes
    before that. A directory with a model of other sizes is refused."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations of the trainer and of the engine."""
    fp8: Fp8Recipe = "none"
    """Matrix products of the trainer's layers in FP8 (Hopper GPU, transformer-engine, bfloat16). On a CPU FP8 is
    emulated: same rounding, no gain in speed or memory. A generated model takes bfloat16 unless `dtype` is given.
    Recipes differ in the values that share a scale. `current`: a whole tensor. `blockwise`: 128 features of one
    token."""
    transformer_impl: Literal["auto", "transformer_engine"] = "auto"
    """Layers of a bfloat16 model. `auto`: Transformer Engine's with FP8 or on a GPU that has it installed, else
    Megatron's own. `transformer_engine`: always; on a CPU its extension is emulated."""
    attention_backend: AttentionBackend = "auto"
    """Kernels of the trainer's attention on a GPU. `auto`: FlexAttention's in Triton. `flash`: FlexAttention's FLASH
    backend, which compiles the kernels of FlashAttention 4 (Hopper GPU, flash-attn-4, bfloat16, heads of at most 128);
    its backward pass adds the gradients of queries in an order that varies."""
    bf16_edge_layers: NonNegative = 0
    """With fp8 `current` or `blockwise`: this many first and this many last layers keep bfloat16 products."""
    fp32_head: bool = False
    """The head's logits of a bfloat16 model stay in float32, in trainer and engine, instead of being rounded to
    bfloat16: their log-probs agree more closely. Weights, hidden states and gradients keep `dtype`."""
    hidden_size: Positive = 128
    """Width of the generated model (used without `path` and `hub_id`, like the next five keys)."""
    layers: Positive = 4
    """Transformer layers of the generated model."""
    heads: Positive = 4
    """Query heads of the generated model."""
    kv_heads: Positive = 4
    """Key/value heads of the generated model."""
    ffn_size: Positive = 384
    """Width of the generated model's gated MLP."""
    vocabulary_size: Positive = 2048
    """Largest vocabulary of a tokenizer trained on the data (byte-level BPE; the generated tasks need fewer)."""
    router_aux_loss: NonNegativeFloat | Literal["model"] = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts, computed over trajectories; a balanced load has a
    loss of 1 per layer. 0, usual in reinforcement learning: no loss. `model`: the `router_aux_loss_coef` of its
    config.json."""
    max_length: Annotated[int, Field(ge=64)] = 2048
    """Longest trajectory in tokens: prompt, model and tool tokens together."""

    @field_validator("fp8", mode="before")
    @classmethod
    def _refuse_delayed(cls, value: object) -> object:
        if value == "delayed":
            raise ValueError(
                "model.fp8=delayed is not offered: its first scales underflow gradients, and its scales depend on the "
                "passes before, so a resumed run differs: use current or blockwise"
            )
        return value

    @property
    def is_generated(self) -> bool:
        """Whether the job generates its model."""
        return self.path is None and self.hub_id is None
