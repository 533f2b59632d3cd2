"""Layer specs of the model: Megatron's, with our norms, core attention, CPU matrix products and router.

In bfloat16 on CUDA the layers are Transformer Engine's (see te_layers.py). Their parameters have other names, which the
weight mapping knows.
"""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from arpo_megatron.actor.attention import TreeAttention
from arpo_megatron.actor.linear import CpuColumnParallelLinear, CpuRowParallelLinear, uses_transformer_engine
from arpo_megatron.actor.moe_router import TreeTopKRouter
from arpo_megatron.actor.te_layers import submodules_of, te_layer, te_norm
from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.spec import ModelSpec


class RMSNorm(nn.Module):
    """RMSNorm with the interface of a layer spec's norm, usable under sequence parallelism.

    Megatron's own wrapper refuses sequence parallelism. It only needs the mark on the weight that makes tensor-parallel
    ranks sum its gradient.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., hidden_size] over the last dimension."""
        return rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def block_spec(config: TransformerConfig, stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage, or of its chunk `stage` in an interleaved pipeline."""
    layers = get_num_layers_to_build(config, vp_stage=stage)
    if uses_transformer_engine(config.params_dtype):
        return TransformerBlockSubmodules(layer_specs=[te_layer(config)] * layers, layer_norm=te_norm())
    layer: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = TreeAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    mlp: MLPSubmodules = submodules_of(layer.submodules.mlp)
    if config.num_moe_experts is not None:
        submodules_of(layer.submodules.mlp).router = TreeTopKRouter
        mlp = submodules_of(submodules_of(layer.submodules.mlp).experts)
    if not torch.cuda.is_available():
        attention.linear_qkv = mlp.linear_fc1 = CpuColumnParallelLinear
        attention.linear_proj = mlp.linear_fc2 = CpuRowParallelLinear
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def expert_fields(spec: ModelSpec, parallel: ParallelConfig, balance_coefficient: float) -> dict[str, Any]:
    """Return the fields of TransformerConfig for a mixture of experts; for a dense model only the dispatcher.

    Tokens travel by all-to-all: expert-parallel ranks hold packs of different lengths, and the all-gather dispatcher
    needs equal lengths.
    """
    # Dense pipelines need it too: the default dispatcher refuses packs of different lengths.
    dispatcher = {"moe_token_dispatcher_type": "alltoall"}
    if (experts := spec.experts) is None:
        return dispatcher
    return {
        **dispatcher,
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": spec.ffn,
        "moe_router_topk": experts.top_k,
        "moe_router_pre_softmax": not experts.normalise,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "aux_loss" if balance_coefficient else "none",
        "moe_aux_loss_coeff": balance_coefficient,
        "moe_expert_capacity_factor": None,  # no token is dropped
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }
