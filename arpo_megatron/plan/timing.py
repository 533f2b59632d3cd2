"""Seconds of a step by phase: bytes and FLOPs divided by the share of its peaks that the hardware reaches.

These shares are assumptions until `arpo bench gpu` has measured them. Comparisons between layouts depend on them less
than the seconds do.
"""

import math
from dataclasses import dataclass

from arpo_megatron.config import JobConfig
from arpo_megatron.hardware.specs import Hardware
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.flops import UpdateFlops, forward_flops, mlp_flops
from arpo_megatron.plan.memory import (
    checkpoint_bytes,
    checkpoint_copy,
    colocated,
    engine_weights,
    kv_bytes,
    offloaded,
    value_bytes,
)
from arpo_megatron.plan.parameters import (
    active_parameters,
    optimizer_parameters,
    replica_counts,
    stage_parameters,
    whole_model,
)
from arpo_megatron.plan.workload import Packing, Workload

PRODUCT_SHARE = 0.6
"""Share of the peak that large matrix products reach in training. Megatron-LM reports 40 to 50 % for whole steps on
H100."""
FP8_SHARE = 0.4
"""The same share for the layers' products in FP8, including casts. Attention and the head stay in bfloat16."""
NARROW_SHARE = 0.5
"""Factor for the experts' products: an expert is narrow and gets only a part of the tokens."""
ATTENTION_SHARE = 0.3
"""Share of the bfloat16 peak that attention reaches, counted in unmasked pairs. FlashAttention-2's forward pass reaches
0.34 to 0.37 on an H100 (arXiv 2407.08608, figure 5); here blocks have masked pairs too, and the backward pass is
slower."""
FLOAT32_SHARE = 1 / 16
"""Ratio of the float32 peak without TF32 to bfloat16's (NVIDIA H100 data sheet: 67 of 989 TFLOP/s)."""
MEMORY_SHARE = 0.7
"""Share of the memory's speed that decoding reaches."""
LINK_SHARE = 0.7
"""Share of a link's or network's speed that collectives reach."""
DECODE_OVERHEAD_S = 0.003
"""Time of a decoding step in addition to its memory traffic: launches, sampling, the scheduler."""
DECODE_REDUCTION_S = 10e-6
"""Latency of an all-reduce among the GPUs of an engine, two per layer and decoding step. Its payload is negligible."""
PUSH_OVERHEAD_S = 1.0
"""Fixed time of a weight push: begin, commit, probe."""
GLOO_SPEED = 4e9
"""Bytes/s that gloo sends from one process, with one thread that copies through TCP, on any network. Assumption; on two
slow cores it is 1.2 to 1.5 GB/s (docs/guides/engines-and-weights.md, the floor of `arpo bench sync`)."""
LENDING_S = 1.0
"""Time per step for engines to lend their memory to the trainer and to take it back. Assumption; `arpo bench gpu push`
measures it."""
START_S = 180.0
"""Time from the start of a job to its first step, without the reading of weights: imports, CUDA graphs, the first
compilation of kernels, the meeting of the ranks. Assumption."""
MAIN_GRADIENT, MASTER_AND_MOMENTS = 4, 12


@dataclass(frozen=True, slots=True)
class Decoding:
    """Predicted batch size and step time of an engine that decodes."""

    engines: int
    batch: float
    """Paths that an engine decodes at once."""
    step_s: float
    alone_s: float
    """Seconds of one step with one path."""


def phase_seconds(
    config: JobConfig, spec: ModelSpec, hardware: Hardware, work: Workload, kv_tokens: int
) -> dict[str, float]:
    """Return the seconds of one step by phase, for trajectories of typical length."""
    if config.sft_only:
        phases = _updates(config, spec, hardware, work, trees=config.sft.batch, updates=1)
        return {**phases, "saves": _saves(config, spec, hardware, step_seconds(config, phases))}
    tasks, updates = config.train.tasks_per_step, config.algorithm.minibatches
    phases = {
        **_rollout(config, spec, hardware, work, kv_tokens),
        "old_logprobs": _passes(config, spec, hardware, work, tasks, updates, backward=False),
        **_updates(config, spec, hardware, work, trees=tasks, updates=updates),
        "weight_push": push_seconds(config, spec, hardware),
    }
    if colocated(config):
        phases["memory_lending"] = LENDING_S
    return {**phases, "saves": _saves(config, spec, hardware, step_seconds(config, phases))}


def _saves(config: JobConfig, spec: ModelSpec, hardware: Hardware, step_s: float) -> float:
    """Return the seconds per step that checkpoints take, with steps of `step_s` seconds.

    Training waits for the copy to host memory, and for the checkpoint before if that is still being written.
    """
    every = config.sft.save_every if config.sft_only else config.train.save_every
    copy = checkpoint_copy(config, spec) / hardware.host_link
    write = checkpoint_bytes(config, spec) / hardware.filesystem
    return copy / every + max(0.0, write / every - step_s)


def start_seconds(spec: ModelSpec, hardware: Hardware, nodes: int, value: int) -> float:
    """Return the seconds before the first step: every node reads the weights, of `value` bytes each, once."""
    return START_S + nodes * whole_model(spec).total * value / hardware.filesystem


def step_seconds(config: JobConfig, phases: dict[str, float]) -> float:
    """Return the seconds of a whole step. Rollouts overlap with training if the config allows it."""
    rollout = sum(phases.get(name, 0.0) for name in ("prefill", "decode", "tools"))
    rest = sum(phases.values()) - rollout
    if config.rollout.max_staleness and config.engine.placement == "split":
        return max(rollout, rest)
    return rollout + rest


def decoding(config: JobConfig, spec: ModelSpec, hardware: Hardware, work: Workload, kv_tokens: int) -> Decoding:
    """Return batch size and step times of decoding.

    The batch is limited by the number of paths, `engine.max_running_requests` and the KV pool. A step reads all weights
    and the batch's keys. Of a mixture it reads the experts that any path visits: 1 - (1 - k/n)^batch of them.
    """
    engine = config.engine
    paths = config.train.tasks_per_step * work.trajectories / engine.replicas
    # Siblings share their beginning in the pool.
    room = kv_tokens / max(1.0, work.unique / work.trajectories)
    batch = max(1.0, min(paths, engine.max_running_requests, room))
    full, alone = (decoding_step(config, spec, hardware, paths, work.depth) for paths in (batch, 1.0))
    return Decoding(engine.replicas, batch, full, alone)


def decoding_step(config: JobConfig, spec: ModelSpec, hardware: Hardware, batch: float, depth: float) -> float:
    """Return the seconds of one step of an engine for `batch` paths with `depth` tokens each."""
    engine = config.engine
    weights = engine_weights(config, spec)
    if spec.experts is not None:
        visited = 1 - (1 - spec.experts.top_k / spec.experts.count) ** batch
        whole = whole_model(spec)
        weights *= (whole.dense + visited * whole.experts) / whole.total
    read = weights + batch * depth * kv_bytes(config, spec)
    compute = 2.0 * active_parameters(spec) * batch / engine.tensor / (hardware.bf16_flops * PRODUCT_SHARE)
    reductions = 2 * spec.layers * DECODE_REDUCTION_S if engine.tensor > 1 else 0.0
    return max(read / (hardware.memory_speed * MEMORY_SHARE), compute) + DECODE_OVERHEAD_S + reductions


def _rollout(
    config: JobConfig, spec: ModelSpec, hardware: Hardware, work: Workload, kv_tokens: int
) -> dict[str, float]:
    """Return the seconds of full batches for the mean number of tokens, then of the longest trajectory alone.

    Of a step's hundreds of trajectories one has the maximal length and calls no tool: one decoding step per token.
    """
    found = decoding(config, spec, hardware, work, kv_tokens)
    tasks = config.train.tasks_per_step
    steps = tasks * work.sampled / found.engines / found.batch
    alone = max(0.0, work.straggler - steps)
    flops = tasks * work.prefilled * 2.0 * active_parameters(spec)
    speed = found.engines * config.engine.tensor * hardware.bf16_flops * PRODUCT_SHARE
    return {
        "prefill": flops / speed,
        "decode": steps * found.step_s + alone * found.alone_s,
        "tools": work.tools_s,
    }


def _updates(
    config: JobConfig, spec: ModelSpec, hardware: Hardware, work: Workload, *, trees: int, updates: int
) -> dict[str, float]:
    return {
        "forward_backward": _passes(config, spec, hardware, work, trees, updates, backward=True),
        "gradient_reduction": updates * _reduction(config, spec, hardware),
        "optimizer": updates * _optimizer(config, spec, hardware),
    }


def _passes(
    config: JobConfig,
    spec: ModelSpec,
    hardware: Hardware,
    work: Workload,
    trees: int,
    updates: int,
    *,
    backward: bool,
) -> float:
    """Return the seconds of all passes over a step's trees, of the data-parallel rank with most trees.

    A pipeline stage idles for a pack's whole pass, including its waits for communication, so the bubble scales both.
    """
    parallel = config.parallel
    packing = work.packing(config)
    own = math.ceil(trees / updates / parallel.data)
    forward = _forward(config, spec, hardware, packing)
    one = forward.hardware_update(parallel, spec.layers) if backward else forward.layers + forward.head
    compute = own * one / (parallel.tensor * parallel.context * parallel.pipeline)
    groups = max(1.0, own * packing.groups)
    bubble = 1.0 + (parallel.pipeline - 1) / (groups * parallel.virtual_pipeline)  # arXiv 2104.04473, section 2.2
    passes = 2.0 + parallel.recomputed_share(spec.layers) if backward else 1.0
    passes += 0.5 * (backward and parallel.recomputes("mlp"))  # one of a layer's two exchanges
    waits = passes * own * packing.computed * _token_traffic(config, spec, hardware)
    return updates * (compute + waits) * bubble


def _forward(config: JobConfig, spec: ModelSpec, hardware: Hardware, packing: Packing) -> UpdateFlops:
    """Return a tree's forward pass on one GPU in seconds, by the parts from which an update's time is computed."""
    tokens = round(packing.computed)
    layers, head = forward_flops(spec, tokens, 0, round(packing.targets))
    pairs, _ = forward_flops(spec, 0, round(packing.pairs), 0)
    experts = 0.0
    if spec.experts is not None:
        experts = spec.layers * 2.0 * spec.experts.top_k * 3 * spec.hidden * spec.ffn * tokens
    peak = hardware.bf16_flops * (FLOAT32_SHARE if config.model.dtype == "float32" else 1.0)
    products = 1 / (peak * PRODUCT_SHARE)
    if config.model.fp8 != "none":
        edges = 2 * config.model.bf16_edge_layers / spec.layers
        products = edges * products + (1 - edges) / (hardware.fp8_flops * FP8_SHARE)
    attention = pairs / (peak * ATTENTION_SHARE)
    inside = (layers - experts + experts / NARROW_SHARE) * products + attention
    mlp = mlp_flops(spec, tokens) * products
    return UpdateFlops(inside, head / (peak * PRODUCT_SHARE), 0.0, attention, mlp)


def _token_traffic(config: JobConfig, spec: ModelSpec, hardware: Hardware) -> float:
    """Return the seconds per token of a stage's collectives in one pass, none of them overlapped."""
    sent = layer_traffic(config, spec).values()
    layers = spec.layers / config.parallel.pipeline
    return layers * sum(size / _link(ranks, hardware) for size, ranks in sent)


def layer_traffic(config: JobConfig, spec: ModelSpec) -> dict[str, tuple[float, int]]:
    """Return by dimension the bytes that a rank sends per token, layer and pass, and the ranks of its group.

    Tensor parallelism: two all-reduces of hidden states per layer and pass (arXiv 1909.08053, section 3), or as many
    gathers and scatters. Context parallelism: keys and values of the other ranks. Experts: dispatch and combine.
    """
    parallel, value = config.parallel, value_bytes(config)
    tokens = 1 / parallel.context
    found = {}
    if parallel.tensor > 1:
        share = 2 * (parallel.tensor - 1) / parallel.tensor
        found["tensor"] = 2 * share * spec.hidden * value * tokens, parallel.tensor
    if parallel.context > 1:
        keys = 2 * spec.kv_heads * spec.head_dim / parallel.tensor * value
        found["context"] = keys * (1 - tokens), parallel.tensor * parallel.context
    if parallel.expert > 1 and spec.experts is not None:
        away = (parallel.expert - 1) / parallel.expert
        sent = spec.experts.top_k * spec.hidden * value * tokens / parallel.tensor
        found["expert"] = 2 * away * sent, parallel.expert
    return found


def _link(ranks: int, hardware: Hardware) -> float:
    """Return the bytes/s of a group of `ranks` neighbouring ranks."""
    return (hardware.link if ranks <= hardware.gpus else hardware.network) * LINK_SHARE


def _reduction(config: JobConfig, spec: ModelSpec, hardware: Hardware) -> float:
    """Return the seconds per update to reduce gradients."""
    size, ranks = reduction_traffic(config, spec)
    return size / _link(ranks, hardware)


def reduction_traffic(config: JobConfig, spec: ModelSpec) -> tuple[float, int]:
    """Return the bytes that a rank sends per update, and the ranks of its group.

    It scatters float32 gradients and gathers weights, or all-reduces gradients.
    """
    parallel = config.parallel
    dense, experts = replica_counts(parallel)
    stages = [stage_parameters(spec, parallel, stage) for stage in range(parallel.pipeline)]
    sent = max(held.dense * (1 - 1 / dense) + held.experts * (1 - 1 / experts) for held in stages)
    back = value_bytes(config) if parallel.distributed_optimizer else MAIN_GRADIENT
    # Groups of both kinds reach over all ranks of a stage.
    return sent * (MAIN_GRADIENT + back), dense * parallel.tensor


def _optimizer(config: JobConfig, spec: ModelSpec, hardware: Hardware) -> float:
    """Return the seconds per update to read and write every byte of state once, on the GPU or in host memory."""
    parallel = config.parallel
    held = max(
        optimizer_parameters(stage_parameters(spec, parallel, stage), parallel) for stage in range(parallel.pipeline)
    )
    touched = held * (2 * MASTER_AND_MOMENTS + MAIN_GRADIENT + value_bytes(config))
    share, here = offloaded(config), touched / (hardware.memory_speed * MEMORY_SHARE)
    travels = held * (MAIN_GRADIENT + value_bytes(config)) / hardware.host_link
    there = travels + touched / (hardware.host_memory_speed / hardware.gpus * MEMORY_SHARE)
    return (1 - share) * here + share * there


def push_seconds(config: JobConfig, spec: ModelSpec, hardware: Hardware) -> float:
    """Return the seconds of a weight push.

    Each engine rank receives its shard, and trainer ranks share the sending. The busier kind counts; neither grows with
    the number of nodes. If each node has a whole replica of the trainer's model, colocated engines receive
    from their own node. Colocated engines with `sync.transport=network` use gloo, because NCCL refuses two ranks on one
    GPU. With `disk` the weights are written once, and every engine reads them.
    """
    if config.sync.transport == "disk":
        size = whole_model(spec).total * value_bytes(config)
        return PUSH_OVERHEAD_S + (1 + config.engine.replicas) * size / hardware.filesystem
    busiest = push_traffic(config, spec)
    if colocated(config) and config.sync.transport == "network":
        return PUSH_OVERHEAD_S + busiest / GLOO_SPEED
    near = push_is_near(config, hardware)
    return PUSH_OVERHEAD_S + busiest / ((hardware.link if near else hardware.network) * LINK_SHARE)


def push_traffic(config: JobConfig, spec: ModelSpec) -> float:
    """Return the bytes of a push through the busiest GPU: it receives a shard, or sends its part of all shards."""
    shard = engine_weights(config, spec)  # FP8 engines receive FP8
    return max(shard, shard * config.engine.tensor * config.engine.replicas / config.parallel.world_size)


def push_is_near(config: JobConfig, hardware: Hardware) -> bool:
    """Return whether every engine receives from its own node."""
    parallel = config.parallel
    stage = max(parallel.tensor * parallel.context, parallel.expert)  # ranks next to each other; stages lie far apart
    near = parallel.world_size <= hardware.gpus or (parallel.pipeline == 1 and stage <= hardware.gpus)
    return near and colocated(config)
