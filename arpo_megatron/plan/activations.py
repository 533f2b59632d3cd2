"""Bytes per token that one layer keeps for the backward pass: a sum over the tensors that its operations save.

There are two implementations of layers: Transformer Engine's around FlexAttention for GPUs in bfloat16 (te_layers.py),
and layers.py for CPUs, whose bytes tests measure. The method is that of Korthikanti et al. (arXiv 2205.05198, section
4); their closed form is for GPT-2's layers (LayerNorm, GELU, dropout, attention scores), which are not used here.

Widths are those of one rank. Tensor parallelism divides heads and the MLP; sequence parallelism also divides the rest.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.spec import ModelSpec, MoESpec
from arpo_megatron.packing.layout import padded_lengths

if TYPE_CHECKING:
    from arpo_megatron.actor.attention_plan import AttentionPlan

EXPERT_IMBALANCE = 1.3
"""Tokens of the busiest rank's experts over the mean; no token is dropped. Assumption; the metric is
`expert_busiest`."""
_DEFAULT_MODULES = ParallelConfig().recompute_modules
TARGET = 40
"""Bytes of the small tensors per predicted token."""
FLOAT = 4
"""Bytes of a float32. Norms keep one per token, attention keeps its normalisers in it."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Sizes of one token's tensors on one rank, in numbers."""

    hidden: float
    """Residual stream."""
    between: float
    """Residual stream outside the divided matrices; smaller with sequence parallelism."""
    queries: float
    """All query heads."""
    keys: float
    """All key heads; values have the same size."""
    ffn: float
    """Gated MLP, or one expert."""
    heads: float
    """Number of query heads."""
    value: int
    """Bytes per number."""

    @classmethod
    def of(cls, spec: ModelSpec, parallel: ParallelConfig, value: int) -> "Widths":
        """Return the widths of a model in a layout, with `value` bytes per number."""
        tensor = parallel.tensor
        return cls(
            hidden=spec.hidden,
            between=spec.hidden / (tensor if parallel.sequence else 1),
            queries=spec.heads * spec.head_dim / tensor,
            keys=spec.kv_heads * spec.head_dim / tensor,
            ffn=spec.ffn / (tensor if spec.experts is None else parallel.expert_tensor),
            heads=spec.heads / tensor,
            value=value,
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """One rank's tokens of a pack."""

    queries: float
    """Tokens that the rank computes."""
    keys: float
    """Tokens that its attention reads, including those of context-parallel ranks and ancestors."""


@dataclass(frozen=True, slots=True)
class LocalCalls:
    """Extra memory of tree attention on a CPU (attention.py), whose calls copy inputs and create masks."""

    joined: int
    """Keys of the calls that concatenate several pieces, summed over calls."""
    pairs: int
    """Computed query-key pairs, each with one number of the mask."""
    views: bool
    """Whether some call's keys are one piece, a view that keeps its whole tensor alive."""

    @classmethod
    def of(cls, plan: "AttentionPlan") -> "LocalCalls":
        """Count the calls of a pack's attention plan."""
        several = [pieces for pieces in plan.keys if len(pieces) > 1]
        joined = sum(plan.piece_sizes[piece] for pieces in several for piece in pieces)
        return cls(joined, plan.pairs, len(several) < len(plan.keys))


def layer_bytes(
    spec: ModelSpec,
    parallel: ParallelConfig,
    tokens: Tokens,
    *,
    value: int,
    fp8: bool = False,
    calls: LocalCalls | None = None,
) -> float:
    """Return the bytes that one layer keeps with `parallel.recompute`, the mean of a stage's layers.

    Args:
        spec: the model.
        parallel: layout.
        tokens: tokens of the pack on this rank.
        value: bytes per number. float32 runs in layers.py on a GPU too.
        fp8: whether inputs of matrix products are kept in FP8.
        calls: attention calls on a CPU; None for FlexAttention.
    """
    w = Widths.of(spec, parallel, value)
    if share := parallel.recomputed_share(spec.layers):
        kept = tokens.queries * w.between * value  # the layer's input
        whole = layer_bytes(spec, without_recompute(parallel), tokens, value=value, fp8=fp8, calls=calls)
        return share * kept + (1 - share) * whole
    visits = 0.0
    if spec.experts is not None:  # a rank with all experts has all visits
        visits = spec.experts.top_k * (EXPERT_IMBALANCE if parallel.expert > 1 else 1.0)
    local = calls is not None or value == FLOAT
    token = _local_token(w, spec, visits, parallel) if local else _te_token(w, spec, visits, fp8, parallel)
    # Output of the projection, of which keys and values, and a norm's input, may be views.
    mixed = (w.queries + 2 * w.keys) * value
    if parallel.recomputes("core_attn"):
        return tokens.queries * (token + mixed + (w.queries + w.keys) * value)  # rotated; values are views
    if calls is None:
        return tokens.queries * (token + mixed) + _flex_core(w, tokens)
    viewed = calls.views or (spec.qk_norm and value == FLOAT)  # other types are copied into float32 first
    core = 2 * w.queries * value + w.heads * FLOAT + (w.keys * value if calls.views else 0.0)
    copies = 2 * calls.joined * w.keys * value + calls.pairs * value
    return tokens.queries * (token + core + (mixed if viewed else 0.0)) + copies


def without_recompute(parallel: ParallelConfig) -> ParallelConfig:
    """Return the same layout, with every activation kept for the backward pass."""
    return replace(parallel, recompute="none", recompute_layers=None, recompute_modules=_DEFAULT_MODULES)


def pass_bytes(
    spec: ModelSpec,
    parallel: ParallelConfig,
    tokens: Tokens,
    targets: float,
    *,
    value: int,
    last: bool,
    fp8: bool = False,
    calls: LocalCalls | None = None,
) -> float:
    """Return the bytes that a forward pass of a pack keeps on a rank: its stage's layers, and the head's inputs.

    Args:
        spec: the model.
        parallel: layout.
        tokens: tokens of the pack on this rank.
        targets: predicted tokens of the pack on this rank.
        value: bytes per number.
        last: whether this is the last stage.
        fp8: see `layer_bytes`.
        calls: see `layer_bytes`.
    """
    layers = spec.layers // parallel.pipeline
    w = Widths.of(spec, parallel, value)
    kept = layers * layer_bytes(spec, parallel, tokens, value=value, fp8=fp8, calls=calls)
    if parallel.virtual_pipeline > 1:  # the interleaved schedule keeps what a chunk has sent (actor/model.py)
        kept += (parallel.virtual_pipeline - last) * tokens.queries * w.between * value
    if not last:
        return kept
    norm = w.between * (2 * FLOAT if calls is not None or value == FLOAT else value) + FLOAT
    # Of each target: its hidden state, its place and id, the advantages' sums, normaliser, entropy and log-prob.
    return kept + tokens.queries * norm + targets * (w.hidden * value + TARGET)


def _te_token(w: Widths, spec: ModelSpec, visits: float, fp8: bool, parallel: ParallelConfig) -> float:
    """Return the bytes per token of Transformer Engine's layers, without core attention and its projection."""
    value, product = w.value, 1 if fp8 else w.value
    norm = w.between * (value + product) + FLOAT  # its input, the next product's input, a normaliser
    per_head = w.queries * value if spec.qk_norm else 0.0  # the norm's copy of the queries
    attention = norm + per_head + w.queries * product
    if spec.experts is not None:
        return attention + _te_experts(w, spec.experts, visits, product, parallel)
    if parallel.recomputes("mlp"):
        return attention + w.between * value
    return attention + norm + 2 * w.ffn * value + w.ffn * product  # the fused activation keeps its input alone


def _local_token(w: Widths, spec: ModelSpec, visits: float, parallel: ParallelConfig) -> float:
    """Return the same bytes for layers.py."""
    value = w.value
    # torch composes RMSNorm: it keeps, in float32, its input, the normalised input and a normaliser.
    gathered = w.hidden * value  # the norm's output as the product reads it
    norm = w.between * 2 * FLOAT + FLOAT
    per_head = 0.0
    if spec.qk_norm:
        per_head = 2 * FLOAT * w.queries + FLOAT * w.keys + FLOAT * (w.heads + w.heads * w.keys / w.queries)
        per_head += 0.0 if value == FLOAT else FLOAT * w.keys  # in float32 the keys' input is a view, not a copy
    rotary = 4 * spec.head_dim * value  # cosines and sines, for queries and for keys
    attention = norm + gathered + per_head + rotary + w.queries * value
    if spec.experts is not None:
        return attention + norm + gathered + _local_experts(w, spec.experts, visits)
    if parallel.recomputes("mlp"):
        return attention + norm + w.between * value
    return attention + norm + gathered + 5 * w.ffn * value  # gate and up, silu(gate), up + 0, the product of both


def _flex_core(w: Widths, tokens: Tokens) -> float:
    """Return FlexAttention's bytes: padded queries, keys and values, the output, normalisers and maximal scores."""
    padded, keys = padded_lengths(ceil(tokens.queries), ceil(tokens.keys))
    return (2 * padded * w.queries + 2 * keys * w.keys) * w.value + padded * w.heads * 2 * FLOAT


def _te_experts(w: Widths, experts: MoESpec, visits: float, product: int, parallel: ParallelConfig) -> float:
    """Return the bytes per token of a mixture with norm and router, for balanced experts."""
    share, value = w.between / w.hidden, w.value
    activated = 0.0 if parallel.recomputes("moe_act") else w.ffn * product
    visit = w.hidden * product + 2 * w.ffn * value + activated + w.hidden * value
    router = 3 * experts.count * FLOAT  # logits, probabilities, the routing map
    norm = (1 if parallel.recomputes("layernorm") else 2) * w.between * value + FLOAT
    return norm + share * (router + visits * visit)


def _local_experts(w: Widths, experts: MoESpec, visits: float) -> float:
    """Return the bytes per token of a mixture in layers.py, without the norm."""
    # Of a visit its input, gate and up, silu(gate), up + 0, their product, and that times the router's weight.
    visit = (w.hidden + 6 * w.ffn) * w.value + 2 * FLOAT
    router = experts.count * (2 * FLOAT + 1) + experts.top_k * 5 * FLOAT  # weights and map of all, choice and places
    return w.between / w.hidden * (router + visits * visit)
