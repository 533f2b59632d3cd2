"""Transformer Engine's layers around tree attention, and what Megatron must be told to use them: bfloat16 on CUDA, FP8.

Megatron's own spec of TE layers is taken as it is; only the core attention (and a mixture's router) is ours. Its linear
layers hold the norm before them (`linear_qkv.layer_norm_weight`), and all experts of a rank are one grouped product.

float32 on CUDA stays with Megatron's own layers: TE's float32 products are TF32, 10 bits of mantissa, while the point
of float32 here is to compare numbers.

Flat packs, too, go through FlexAttention: TE's fused attention would need the keys of inherited ancestors as sequences
of their own and another kernel for old log-probs and training where a minibatch mixes trees and sequences.

Which of Megatron's fusions are on, with TE 2.11 and megatron-core 0.16.1:

    apply_rope_fusion               on: one kernel, cosines in float32 (Megatron's own rounds them to bfloat16). It
                                    takes a row of angles a token: any positions will do, depths in a tree too.
    bias_activation_fusion          on: SwiGLU in one kernel that keeps its input alone for the backward pass.
    moe_grouped_gemm                on: one call for all experts of a rank instead of one each.
    gradient_accumulation_fusion    off: Megatron refuses to build the output head with it unless apex is installed.
    bias_dropout_fusion             off: there are no such biases and no dropout; what is left is one addition.
    masked_softmax_fusion           off: it belongs to the core attention that is replaced.
    persist_layer_norm              off: apex's norms; TE has its own.
    moe_permute_fusion              off: not measured here yet.
"""

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from arpo_megatron.actor.attention import TreeAttention
from arpo_megatron.actor.moe_router import TreeTopKRouter
from arpo_megatron.errors import UserError

if TYPE_CHECKING:
    from arpo_megatron.config import Fp8Recipe, ModelConfig

_RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    # The amaxima are exchanged within tensor- and context-parallel groups only: data-parallel ranks run different
    # numbers of packs, and an exchange among them after every pass would wait for ever.
    "delayed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": 16,
        "fp8_amax_compute_algo": "max",
        "tp_only_amax_red": True,
    },
    "current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    # All in e4m3: with a scale for every 128 values, gradients need precision more than range.
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}


@dataclass(frozen=True, slots=True)
class Fp8:
    """Number format of the matrix products.

    Attributes:
        recipe: how tensors are scaled.
        bf16_edge_layers: layers at either end that stay in bfloat16.
    """

    recipe: "Fp8Recipe" = "none"
    bf16_edge_layers: int = 0

    @classmethod
    def of(cls, model: "ModelConfig") -> "Fp8":
        """As the job says."""
        return cls(model.fp8, model.bf16_edge_layers)

    def fields(self) -> dict[str, Any]:
        """Fields of TransformerConfig."""
        edges = self.bf16_edge_layers
        return _RECIPES[self.recipe] | (
            {
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": edges,
                "num_layers_at_end_in_bf16": edges,
            }
            if edges
            else {}
        )


NO_FP8 = Fp8()


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Whether a model of this type is made of TE's layers on this machine."""
    return (
        dtype == torch.bfloat16
        and torch.cuda.is_available()
        and importlib.util.find_spec("transformer_engine") is not None
    )


def te_fields(dtype: torch.dtype, fp8: Fp8, *, experts: bool) -> dict[str, Any]:
    """Fields of TransformerConfig that TE's layers want; none without them.

    Raises:
        UserError: FP8 without TE's layers.
    """
    if not uses_transformer_engine(dtype):
        if fp8 != NO_FP8:
            raise UserError(f"model.fp8={fp8.recipe} needs bfloat16, a GPU and transformer-engine")
        return {}
    return {
        "apply_rope_fusion": True,
        "bias_activation_fusion": True,
        "moe_grouped_gemm": experts,
        **fp8.fields(),
    }


def te_layer(config: TransformerConfig) -> ModuleSpec:
    """A layer of TE modules around tree attention; the config's fields come from `te_fields`."""
    layer: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    layer.submodules.self_attention.submodules.core_attention = TreeAttention
    if config.num_moe_experts is not None:
        layer.submodules.mlp.submodules.router = TreeTopKRouter
    return layer


def te_norm() -> Any:
    """The norm behind the last layer."""
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm
