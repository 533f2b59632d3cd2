"""Transformer Engine's layers around tree attention, for bfloat16 on CUDA and FP8.

Megatron's spec of TE layers is used unchanged except for the core attention and a mixture's router. Its linear layers
include the norm before them (`linear_qkv.layer_norm_weight`), and all experts of a rank are one grouped product.

float32 on CUDA uses Megatron's own layers. TE computes float32 products in TF32 with 10 bits of mantissa; float32 here
serves to compare numbers.

Flat packs use FlexAttention too; docs/internals/attention.md has the reasons against TE's fused attention.

Megatron's fusions, with TE 2.11 and megatron-core 0.16.1:

    apply_rope_fusion               on: one kernel, cosines in float32 (Megatron's own rounds them to bfloat16). It
                                    takes one row of angles per token, so depths in a tree are possible positions.
    bias_activation_fusion          on: SwiGLU in one kernel that keeps only its input for the backward pass.
    moe_grouped_gemm                on: one call for all experts of a rank.
    gradient_accumulation_fusion    off: Megatron refuses to build the output head with it unless apex is installed.
                                    `fuse_weight_gradients` has its effect in TE's layers.
    bias_dropout_fusion             off: the model has no such biases and no dropout.
    masked_softmax_fusion           off: it belongs to the core attention that is replaced.
    persist_layer_norm              off: it selects apex's norms; TE has its own.
    moe_permute_fusion              on: it sums a token's experts in one order. Without it they are added by atomics,
                                    so that two passes over one pack differ.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from arpo_megatron.actor.attention import TreeAttention
from arpo_megatron.actor.linear import uses_transformer_engine
from arpo_megatron.actor.moe_router import TreeTopKRouter
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.transformer_engine import INSTALL_EXTENSION, is_emulated

if TYPE_CHECKING:
    from arpo_megatron.config import Fp8Recipe, ModelConfig

_RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    "current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    # All in e4m3: with a scale for every 128 values, gradients need precision more than range.
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}


@dataclass(frozen=True, slots=True)
class Fp8:
    """Number format of the matrix products."""

    recipe: "Fp8Recipe" = "none"
    """How tensors are scaled."""
    bf16_edge_layers: int = 0
    """Number of layers at either end that stay in bfloat16."""

    @classmethod
    def of(cls, model: "ModelConfig") -> "Fp8":
        """Return the number format that section `model` asks for."""
        return cls(model.fp8, model.bf16_edge_layers)

    def fields(self) -> dict[str, Any]:
        """Return keyword arguments of Megatron's `TransformerConfig`; none without FP8."""
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


def number_format(model: "ModelConfig") -> str:
    """Name the format of the layers' matrix products, and whether this rank emulates it."""
    name = model.dtype if model.fp8 == "none" else f"fp8 {model.fp8}"
    return f"{name} (emulated)" if is_emulated() else name


def te_fields(dtype: torch.dtype, fp8: Fp8, *, experts: bool) -> dict[str, Any]:
    """Return the fields of TransformerConfig that TE's layers need; none if the model does not use TE.

    Raises:
        UserError: FP8 is requested and the model does not use TE.
    """
    if not uses_transformer_engine(dtype):
        if fp8 != NO_FP8:
            raise UserError(
                f"model.fp8={fp8.recipe} needs model.dtype=bfloat16 and transformer-engine: on a CPU (emulated) "
                f"pip install 'arpo-megatron[emulation]', on a GPU {INSTALL_EXTENSION}"
            )
        return {}
    return {
        "apply_rope_fusion": True,
        "bias_activation_fusion": True,
        "moe_grouped_gemm": experts,
        "moe_permute_fusion": experts,
        **fp8.fields(),
    }


def fuse_weight_gradients(wrapped: Any) -> None:
    """Let TE's layers add weight gradients to `main_grad` within the product, without a copy in bfloat16.

    Args:
        wrapped: model chunk in Megatron's DistributedDataParallel, which has given its parameters their `main_grad`.
    """
    module: Any
    for module in wrapped.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
    # Pipeline schedules call it before their first micro-batch and would undo `begin_weights`.
    wrapped.set_is_first_microbatch = lambda: None


def begin_weights(chunk: nn.Module) -> None:
    """Let FP8 layers quantize their weights in the next pass, once for all packs.

    TE's own mark for that, a true `is_first_microbatch`, also lets the backward pass of this pack overwrite
    `main_grad`. It would delete the gradients of later packs, whose backward passes come before.
    """
    module: Any
    for module in chunk.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = False
            module._fp8_workspaces.clear()  # a missing copy is made


def te_layer(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of a layer of TE modules around tree attention."""
    layer: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    layer.submodules.self_attention.submodules.core_attention = TreeAttention
    if config.num_moe_experts is not None:
        submodules_of(layer.submodules.mlp).router = TreeTopKRouter
    return layer


def submodules_of(spec: Any) -> Any:
    """Return the submodules of a part of a layer spec: a `ModuleSpec`, or since megatron-core 0.19 a partial call."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def te_norm() -> Any:
    """Return the class of the norm after the last layer."""
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm
