"""Tree attention of a layer: on a CPU one scaled-dot-product call per block of queries (see attention_plan.py).

On a GPU the plan of a pack is one for FlexAttention (flex_attention.py).
"""

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from arpo_megatron.actor.attention_plan import AttentionPlan
from arpo_megatron.actor.context import lookup
from arpo_megatron.actor.flex_attention import FlexPlan, flex_tree_attention
from arpo_megatron.config import AttentionBackend


def tree_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Compute attention of one pack under its tree mask.

    Args:
        query: [q, heads, head_dim], the tokens of the plan's blocks in order, then padding.
        key: [n, groups, head_dim], all tokens of the pack; heads is a multiple of groups.
        value: [n, groups, head_dim].
        plan: from `plan_attention`.
        scale: factor of the scores.

    Returns:
        [q, heads, head_dim] in the dtype of `query`; zeros for padding.
    """
    sizes = [block.stop - block.start for block in plan.blocks]
    padding = len(query) - plan.queries
    grouped = query.shape[1] != key.shape[1]
    # One split each, and concatenation: indexing the same tensor once a block would add a full-size gradient a block.
    queries = query.transpose(0, 1).unsqueeze(0).split([*sizes, padding], dim=2)
    keys = key.transpose(0, 1).unsqueeze(0).split(plan.piece_sizes, dim=2)
    values = value.transpose(0, 1).unsqueeze(0).split(plan.piece_sizes, dim=2)
    outputs = [
        scaled_dot_product_attention(
            block_queries,
            _join(keys, pieces),
            _join(values, pieces),
            attn_mask=mask,
            scale=scale,
            enable_gqa=grouped,
        )
        for block_queries, pieces, mask in zip(queries, plan.keys, plan.masks, strict=False)
    ]
    if padding:
        # Zeros that depend on all three: a rank with nothing but padding takes part in summing their gradients, and
        # every parameter gets one.
        outputs.append(0.0 * (queries[-1] + key[:1].sum() + value[:1].sum()))
    return torch.cat(outputs, dim=2).squeeze(0).transpose(0, 1)


def _join(parts: tuple[Tensor, ...], pieces: tuple[int, ...]) -> Tensor:
    return parts[pieces[0]] if len(pieces) == 1 else torch.cat([parts[piece] for piece in pieces], dim=2)


class TreeAttention(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """Core attention of a layer spec, in the place of Megatron's DotProductAttention.

    The handle in `attention_mask` leads to the layout of the pack (see context.py).
    """

    backend: AttentionBackend = "auto"
    """Kernels on a GPU."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [q, 1, heads, dim] and key, value [q, 1, groups, dim] of this rank -> [q, 1, heads * dim]."""
        context = lookup(attention_mask)
        keys, values = context.keys_and_values(self.layer_number, key.squeeze(1), value.squeeze(1))
        plan, tensors = context.plan, (query.squeeze(1), keys, values)
        if isinstance(plan, FlexPlan):
            output = flex_tree_attention(*tensors, plan, self.softmax_scale, self.backend)
        else:
            output = tree_attention(*tensors, plan, self.softmax_scale)
        return output.reshape(len(query), 1, -1)


def use_attention_backend(chunk: nn.Module, backend: AttentionBackend) -> None:
    """Choose the kernels of all layers of a model chunk (`model.attention_backend`)."""
    for module in chunk.modules():
        if isinstance(module, TreeAttention):
            module.backend = backend
