"""Seconds of the forward and backward passes over a step's trees, by part.

The parts are those of the slowest rank: the data-parallel rank with most work, and in a pipeline the last stage, which
has the head besides its layers.
"""

from dataclasses import dataclass

from arpo_megatron.config import JobConfig
from arpo_megatron.hardware.specs import Hardware
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.flops import BACKWARD, forward_flops, mlp_flops
from arpo_megatron.plan.activations import EXPERT_IMBALANCE, FLOAT
from arpo_megatron.plan.kernels import (
    backward_bytes,
    forward_bytes,
    head_bytes,
    repeated_bytes,
    vocabulary_gradient_bytes,
)
from arpo_megatron.plan.memory import value_bytes
from arpo_megatron.plan.shares import (
    ATTENTION_SHARE,
    FLOAT32_SHARE,
    FP8_SHARE,
    NARROW_SHARE,
    PRODUCT_SHARE,
    group_speed,
    memory_seconds,
)
from arpo_megatron.plan.slowest_rank import slowest_rank
from arpo_megatron.plan.workload import Packing, Workload

Parts = dict[str, float]
"""Seconds by part: `attention`, `matrix_products`, `memory_bound_kernels`, `head`, the collectives of each dimension
(`tensor_parallelism` and so on), and `pipeline_bubble`."""


@dataclass(frozen=True, slots=True)
class Products:
    """Seconds of the products of a tree's forward pass on one GPU."""

    layers: float
    """Products of the layers' matrices."""
    mlp: float
    """Products of a dense model's MLPs, a part of `layers`."""
    attention: float
    head: float


def pass_seconds(
    config: JobConfig, spec: ModelSpec, hardware: Hardware, work: Workload, trees: int, updates: int, *, backward: bool
) -> Parts:
    """Return the seconds of all passes over a step's trees by part.

    Args:
        config: the job.
        spec: the model.
        hardware: node to run on.
        work: the trees.
        trees: trees of a step (conversations, for a cold start).
        updates: updates of a step.
        backward: count forward and backward passes of updates, not the forward pass of old log-probs.
    """
    parallel, packing = config.parallel, work.packing(config, spec)
    own = slowest_rank(config, spec, work, -(-trees // updates))
    layers = {
        **_layer_products(config, spec, hardware, packing, backward=backward),
        "memory_bound_kernels": memory_seconds(_layer_bytes(config, spec, packing, backward=backward), hardware),
        **_collectives(config, spec, hardware, packing, backward=backward),
    }
    parts = {**layers, "head": _head(config, spec, hardware, packing, backward=backward)}
    if parallel.pipeline > 1:
        # The stages before the last one fill and drain the pipeline (arXiv 2104.04473, section 2.2).
        groups = max(1.0, own * packing.groups) * parallel.virtual_pipeline
        parts["pipeline_bubble"] = (parallel.pipeline - 1) * sum(layers.values()) / groups
    if backward:
        packs = max(1.0, own * packing.packs) / own  # of a tree
        size = vocabulary_gradient_bytes(spec, parallel, value_bytes(config), embedding=parallel.pipeline == 1)
        parts["head"] += packs * memory_seconds(size, hardware)
    return {name: updates * own * seconds for name, seconds in parts.items()}


def products(config: JobConfig, spec: ModelSpec, hardware: Hardware, packing: Packing) -> Products:
    """Return the seconds of a tree's products in a forward pass on one GPU, from their FLOPs."""
    tokens = round(packing.computed)
    layers, head = forward_flops(spec, tokens, 0, round(packing.targets))
    pairs, _ = forward_flops(spec, 0, round(packing.pairs), 0)
    experts = busiest = 0.0
    if spec.experts is not None:
        experts = spec.layers * 2.0 * spec.experts.top_k * 3 * spec.hidden * spec.ffn * tokens
        busiest = experts * (EXPERT_IMBALANCE if config.parallel.expert > 1 else 1.0)
    peak = hardware.bf16_flops * (FLOAT32_SHARE if config.model.dtype == "float32" else 1.0)
    second = 1 / (peak * PRODUCT_SHARE)
    if config.model.fp8 != "none":
        edges = 2 * config.model.bf16_edge_layers / spec.layers
        second = edges * second + (1 - edges) / (hardware.fp8_flops * FP8_SHARE)
    return Products(
        layers=(layers - experts + busiest / NARROW_SHARE) * second,
        mlp=mlp_flops(spec, tokens) * second,
        attention=pairs / (peak * ATTENTION_SHARE),
        head=head / (peak * PRODUCT_SHARE),
    )


def _layer_products(
    config: JobConfig, spec: ModelSpec, hardware: Hardware, packing: Packing, *, backward: bool
) -> Parts:
    """Return the seconds of a tree's attention and products in the layers of one stage, on one rank."""
    parallel, one = config.parallel, products(config, spec, hardware, packing)
    passes = 1 + BACKWARD + parallel.recomputed_share(spec.layers) if backward else 1.0
    attention, matrices = passes * one.attention, passes * one.layers
    if backward:
        attention += one.attention if parallel.recomputes("core_attn") else 0.0
        matrices += one.mlp if parallel.recomputes("mlp") else 0.0
    ranks = parallel.tensor * parallel.context * parallel.pipeline
    return {"attention": attention / ranks, "matrix_products": matrices / ranks}


def _layer_bytes(config: JobConfig, spec: ModelSpec, packing: Packing, *, backward: bool) -> float:
    """Return the bytes of a tree's memory-bound kernels in the layers of one stage, on one rank."""
    parallel, value = config.parallel, value_bytes(config)
    token = sum(forward_bytes(spec, parallel, value).values())
    if backward:
        token += sum(backward_bytes(spec, parallel, value).values()) + repeated_bytes(spec, parallel, value)
    return spec.layers / parallel.pipeline * packing.computed / parallel.context * token


def _head(config: JobConfig, spec: ModelSpec, hardware: Hardware, packing: Packing, *, backward: bool) -> float:
    """Return the seconds of a tree's head on one rank of the last stage; the backward pass repeats its logits."""
    parallel, value = config.parallel, value_bytes(config)
    passes = 2 + BACKWARD if backward else 1.0
    compute = passes * products(config, spec, hardware, packing).head / (parallel.tensor * parallel.context)
    logit = FLOAT if config.model.fp32_head else value
    target = head_bytes(spec, parallel, logit, value, backward=backward)
    return compute + memory_seconds(packing.targets / parallel.context * target, hardware)


def _collectives(config: JobConfig, spec: ModelSpec, hardware: Hardware, packing: Packing, *, backward: bool) -> Parts:
    """Return the seconds of a tree's collectives in the layers of one stage, none of them overlapped."""
    parallel = config.parallel
    passes = 2.0 + parallel.recomputed_share(spec.layers) if backward else 1.0
    passes += 0.5 * (backward and parallel.recomputes("mlp"))  # one of a layer's two exchanges
    tokens = passes * spec.layers / parallel.pipeline * packing.computed
    return {
        f"{name}_parallelism": tokens * size / group_speed(ranks, hardware)
        for name, (size, ranks) in layer_traffic(config, spec).items()
    }


def layer_traffic(config: JobConfig, spec: ModelSpec) -> dict[str, tuple[float, int]]:
    """Return by dimension the bytes that a rank sends per token, layer and pass, and the ranks of its group.

    Tensor parallelism: two all-reduces of hidden states per layer and pass (arXiv 1909.08053, section 3), or as many
    gathers and scatters. Context parallelism: keys and values of the other ranks. Experts: dispatch and combine.
    """
    parallel, value = config.parallel, value_bytes(config)
    tokens = 1 / parallel.context
    found = {}
    if parallel.tensor > 1:
        found["tensor"] = all_reduces(config, spec, parallel.tensor) * tokens, parallel.tensor
    if parallel.context > 1:
        keys = 2 * spec.kv_heads * spec.head_dim / parallel.tensor * value
        found["context"] = keys * (1 - tokens), parallel.tensor * parallel.context
    if parallel.expert > 1 and spec.experts is not None:
        away = (parallel.expert - 1) / parallel.expert
        sent = spec.experts.top_k * spec.hidden * value * tokens / parallel.tensor
        found["expert"] = 2 * away * sent, parallel.expert
    return found


def all_reduces(config: JobConfig, spec: ModelSpec, ranks: int) -> float:
    """Return the bytes that one of `ranks` tensor-parallel ranks sends per token and layer in a forward pass."""
    return 2 * 2 * (ranks - 1) / ranks * spec.hidden * value_bytes(config)
