"""The policy: Megatron's GPTModel over a pack instead of a batch of sequences.

It differs from GPTModel in three ways: positions are depths in the tree, the core attention is `TreeAttention`, and the
output is the log-prob and entropy of each predicted token instead of logits.
"""

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from arpo_megatron.actor.layers import block_spec, expert_fields
from arpo_megatron.actor.linear import uses_transformer_engine
from arpo_megatron.actor.logprobs import target_logprobs
from arpo_megatron.actor.te_layers import NO_FP8, Fp8, te_fields
from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Parameter dtypes by name; float64 is for tests of exactness."""


class TreeGPTModel(GPTModel):  # type: ignore[misc]  # Megatron has no types
    """GPTModel with a pack as input and log-probs as output."""

    fp32_head: bool = False
    """The logits of a bfloat16 model are not rounded to bfloat16."""

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        handle: Tensor,
        predictors: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Compute log-probs and entropies of the predicted tokens.

        Args:
            token_ids: int64[n] of this rank; n is a multiple of the tensor-parallel size under sequence parallelism.
            position_ids: int64[n], depth of each token in its trajectory.
            handle: int64[] on the CPU, handle of the pack's context (see context.py).
            predictors: int64[m], indices of the tokens that predict the targets.
            targets: int64[m], the predicted token ids.
            temperature: divides the logits.

        Returns:
            float32[m] log-probs and float32[m] entropies in nats; before the last pipeline stage, hidden states
            [n, 1, hidden].
        """
        embedded = self.embedding(token_ids[None], position_ids[None]) if self.pre_process else None
        frequencies = torch.outer(position_ids.to(self.rotary_pos_emb.inv_freq.dtype), self.rotary_pos_emb.inv_freq)
        hidden = self.decoder(
            hidden_states=embedded,
            attention_mask=handle,
            rotary_pos_emb=torch.cat([frequencies, frequencies], dim=-1)[:, None, None],
        )
        if not self.post_process:
            return hidden  # type: ignore[no-any-return]  # Megatron has no types
        group = self.pg_collection.tp
        # Both ways, the gradient of the hidden states is summed over the vocabulary shards.
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=group)
        elif group.size() > 1:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)
        head = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        return target_logprobs(
            hidden.squeeze(1).index_select(0, predictors),
            head,
            targets,
            temperature=temperature,
            group=group,
            fp32_logits=self.fp32_head,
        )


def build_chunks(
    spec: ModelSpec,
    parallel: ParallelConfig,
    dtype: str | torch.dtype,
    *,
    initialize: bool = True,
    balance_coefficient: float = 0.0,
    fp8: Fp8 = NO_FP8,
) -> list[TreeGPTModel]:
    """Build the model of this rank: one chunk, or `parallel.virtual_pipeline` chunks for the interleaved schedule."""
    count = parallel.virtual_pipeline
    return [
        build_model(
            spec,
            parallel,
            dtype,
            initialize=initialize,
            stage=stage if count > 1 else None,
            balance_coefficient=balance_coefficient,
            fp8=fp8,
        )
        for stage in range(count)
    ]


def build_model(
    spec: ModelSpec,
    parallel: ParallelConfig,
    dtype: str | torch.dtype,
    *,
    initialize: bool = True,
    stage: int | None = None,
    balance_coefficient: float = 0.0,
    fp8: Fp8 = NO_FP8,
) -> TreeGPTModel:
    """Build a model chunk of this rank, on its device and in training mode (there is no dropout).

    Args:
        spec: sizes and family traits.
        parallel: the layout that Megatron's parallel state was initialized with.
        dtype: dtype of parameters and activations.
        initialize: draw random weights from torch's generator, equal in layouts without pipeline and expert
            parallelism. False leaves them undefined for a load that follows.
        stage: index of the chunk in a virtual pipeline; None without one.
        balance_coefficient: coefficient of the router's load-balancing loss (see moe_router.py).
        fp8: number format of the layers' matrix products.

    Raises:
        UserError: heads, MLP, vocabulary or layers cannot be divided by the layout.
    """
    spec.check_divisible(parallel)
    config = transformer_config(
        spec,
        parallel,
        DTYPES[dtype] if isinstance(dtype, str) else dtype,
        initialize=initialize,
        balance_coefficient=balance_coefficient,
        fp8=fp8,
    )
    model = TreeGPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, stage),
        vocab_size=spec.vocabulary,
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
        vp_stage=stage,
    )
    _mark_divided(model)
    if (stretch := spec.rope_scaling) is not None:
        # Megatron's own switch has Llama 3.1's bounds as constants; its function takes any.
        rotary = model.rotary_pos_emb
        rotary.inv_freq = rotary._apply_scaling(
            rotary.inv_freq,
            stretch.factor,
            stretch.low_freq_factor,
            stretch.high_freq_factor,
            stretch.original_max_positions,
        )
    return model.to(torch.cuda.current_device()) if torch.cuda.is_available() else model


def _mark_divided(model: TreeGPTModel) -> None:
    """Mark weights that tensor-parallel ranks divide, as Megatron does when it draws random weights itself.

    Without the mark, a model that is built to be loaded would count only the first rank's part in the gradient norm,
    because Megatron takes the other parts for copies. Transformer Engine's layers mark their weights.
    """
    for module in model.modules():
        if not isinstance(module, VocabParallelEmbedding | ColumnParallelLinear | RowParallelLinear):
            continue
        weight = module.weight  # None where the output layer has the embedding's
        if weight is not None and not hasattr(weight, "tensor_model_parallel"):
            dimension = 1 if isinstance(module, RowParallelLinear) else 0
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dimension, stride=1)


def transformer_config(
    spec: ModelSpec,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    *,
    initialize: bool = True,
    balance_coefficient: float = 0.0,
    fp8: Fp8 = NO_FP8,
) -> TransformerConfig:
    """Return Megatron's configuration for `spec`. Its fusions are off unless te_layers.py turns them on."""
    return TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        variable_seq_lengths=parallel.pipeline > 1,
        # Megatron's batched exchange between stages needs NCCL; the interleaved schedule overlaps it instead.
        batch_p2p_comm=parallel.virtual_pipeline == 1,
        overlap_p2p_comm=parallel.virtual_pipeline > 1,
        # Only a very old GPU needs a synchronisation of the device after each batched exchange.
        batch_p2p_sync=False,
        # A stage's output is needed until it is sent; its gradient needs only its place in the graph. The interleaved
        # schedule would free it before that.
        deallocate_pipeline_outputs=parallel.virtual_pipeline == 1,
        sequence_parallel=parallel.sequence,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=initialize,
        # The loss arrives normalised over the whole batch: gradients are summed over micro-batches and
        # data-parallel ranks, and this switch turns off both of Megatron's averages.
        calculate_per_token_loss=True,
        **recompute_fields(parallel, dtype, experts=spec.experts is not None),
        **expert_fields(spec, parallel, balance_coefficient),
        **te_fields(dtype, fp8, experts=spec.experts is not None),
    )


def recompute_fields(parallel: ParallelConfig, dtype: torch.dtype, *, experts: bool) -> dict[str, Any]:
    """Return the fields of TransformerConfig for the activations that are computed again.

    Megatron computes `layernorm` again only next to Transformer Engine (its checkpoint asks TE for the FP8 state), and
    `moe_act` only in TE's grouped experts.
    """
    if parallel.recompute == "none":
        return {}
    if parallel.recompute == "selective":
        engine = uses_transformer_engine(dtype)
        absent = {"layernorm": not engine, "moe_act": not (engine and experts)}
        modules = [name for name in parallel.recompute_modules if not absent.get(name)]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    layers = parallel.recompute_layers
    method = {"recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "full"} | (
        method if layers is None else {"recompute_method": "block", "recompute_num_layers": layers}
    )
