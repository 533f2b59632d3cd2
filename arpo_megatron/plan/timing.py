"""Seconds of a step by phase: bytes and FLOPs divided by the share of its peaks that the hardware reaches (shares.py).

The passes over trees are in passes.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from arpo_megatron.config import JobConfig
from arpo_megatron.hardware.specs import Hardware
from arpo_megatron.models.spec import ModelSpec
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
from arpo_megatron.plan.passes import Parts, pass_seconds
from arpo_megatron.plan.shares import LINK_SHARE, MEMORY_SHARE, PRODUCT_SHARE, group_speed, memory_seconds
from arpo_megatron.plan.workload import Workload

DECODE_OVERHEAD_S = 0.003
"""Time of a decoding step in addition to its memory traffic: launches, sampling, the scheduler."""
DECODE_REDUCTION_S = 10e-6
"""Latency of an all-reduce among the GPUs of an engine, two per layer and decoding step. Its payload is negligible."""
PUSH_OVERHEAD_S = 1.0
"""Time of a weight push in addition to its bytes: begin, commit, checksums, probe. Assumption. The checksums of a
mixture's many tensors take seconds more (docs/reference/performance.md)."""
GLOO_SPEED = 4e9
"""Bytes/s that gloo sends from one process, with one thread that copies through TCP, on any network. Assumption; in
`arpo bench sync`, `floor_s` of `network` has the seconds of such a transfer and of one more copy."""
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
) -> dict[str, Parts]:
    """Return the seconds of one step by phase and part, for trajectories of typical length.

    Phases have the names of a run's metrics (`seconds/NAME`) and of `seconds_by_phase` of `arpo bench gpu step`.
    """
    if config.sft_only:
        phases = {"update": _updates(config, spec, hardware, work, trees=config.sft.batch, updates=1)}
    else:
        tasks, updates = config.train.tasks_per_step, config.algorithm.minibatches
        phases = {
            "rollout": _rollout(config, spec, hardware, work, kv_tokens),
            **({"lend": {"memory_lending": LENDING_S}} if colocated(config) else {}),
            "logprobs": pass_seconds(config, spec, hardware, work, tasks, updates, backward=False),
            "update": _updates(config, spec, hardware, work, trees=tasks, updates=updates),
            "push": {"weight_push": push_seconds(config, spec, hardware)},
        }
    return {**phases, "save": _saves(config, spec, hardware, step_seconds(config, phases))}


def _saves(config: JobConfig, spec: ModelSpec, hardware: Hardware, step_s: float) -> Parts:
    """Return the seconds per step that checkpoints take, with steps of `step_s` seconds.

    Training waits for the copy to host memory, and for the checkpoint before if that is still being written.
    """
    every = config.sft.save_every if config.sft_only else config.train.save_every
    copy = checkpoint_copy(config, spec) / hardware.host_link
    write = checkpoint_bytes(config, spec) / hardware.filesystem
    return {"copy": copy / every, "wait_for_last_write": max(0.0, write / every - step_s)}


def start_seconds(spec: ModelSpec, hardware: Hardware, nodes: int, value: int) -> float:
    """Return the seconds before the first step: every node reads the weights, of `value` bytes each, once."""
    return START_S + nodes * whole_model(spec).total * value / hardware.filesystem


def step_seconds(config: JobConfig, phases: Mapping[str, Parts]) -> float:
    """Return the seconds of a whole step. Rollouts overlap with training if the config allows it."""
    rollout = sum(phases.get("rollout", {}).values())
    rest = sum(sum(parts.values()) for name, parts in phases.items() if name != "rollout")
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
    return max(memory_seconds(read, hardware), compute) + DECODE_OVERHEAD_S + reductions


def _rollout(config: JobConfig, spec: ModelSpec, hardware: Hardware, work: Workload, kv_tokens: int) -> Parts:
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
) -> Parts:
    return {
        **pass_seconds(config, spec, hardware, work, trees, updates, backward=True),
        "gradient_reduction": updates * _reduction(config, spec, hardware),
        "optimizer": updates * _optimizer(config, spec, hardware),
    }


def _reduction(config: JobConfig, spec: ModelSpec, hardware: Hardware) -> float:
    """Return the seconds per update to reduce gradients."""
    size, ranks = reduction_traffic(config, spec)
    return size / group_speed(ranks, hardware)


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
    """Return the seconds per update to read and write every byte of state once, on the GPU or in host memory.

    Before, the GPU zeroes the gradient buffer and reads the gradient for its norm. Clipping happens seldom and is not
    counted.
    """
    parallel = config.parallel
    stages = [stage_parameters(spec, parallel, stage) for stage in range(parallel.pipeline)]
    held = max(optimizer_parameters(stage, parallel) for stage in stages)
    touched = held * (2 * MASTER_AND_MOMENTS + MAIN_GRADIENT + value_bytes(config))
    share, here = offloaded(config), memory_seconds(touched, hardware)
    travels = held * (MAIN_GRADIENT + value_bytes(config)) / hardware.host_link
    there = travels + touched / (hardware.host_memory_speed / hardware.gpus * MEMORY_SHARE)
    before = memory_seconds(MAIN_GRADIENT * (held + max(stage.total for stage in stages)), hardware)
    return before + (1 - share) * here + share * there


def push_seconds(config: JobConfig, spec: ModelSpec, hardware: Hardware) -> float:
    """Return the seconds of a weight push.

    Each engine rank receives its shard, and trainer ranks share the sending. The busier kind counts; neither grows with
    the number of nodes. If each node has a whole replica of the trainer's model, colocated engines receive
    from their own node. Colocated engines with `sync.transport=network` use gloo, because NCCL refuses two ranks on one
    GPU. With `disk` the weights are written once, and every engine reads them.
    """
    if config.sync.transport == "disk":
        return PUSH_OVERHEAD_S + file_push_traffic(config, spec) / hardware.filesystem
    busiest = push_traffic(config, spec)
    if colocated(config) and config.sync.transport == "network":
        return PUSH_OVERHEAD_S + busiest / GLOO_SPEED
    near = push_is_near(config, hardware)
    return PUSH_OVERHEAD_S + busiest / ((hardware.link if near else hardware.network) * LINK_SHARE)


def push_traffic(config: JobConfig, spec: ModelSpec) -> float:
    """Return the bytes of a push through the busiest GPU: it receives a shard, or sends its part of all shards."""
    shard = engine_weights(config, spec)  # FP8 engines receive FP8
    return max(shard, shard * config.engine.tensor * config.engine.replicas / config.parallel.world_size)


def file_push_traffic(config: JobConfig, spec: ModelSpec) -> float:
    """Return the bytes of a push with `sync.transport=disk`: one write of the weights, and a read by every engine."""
    return (1 + config.engine.replicas) * whole_model(spec).total * value_bytes(config)


def push_is_near(config: JobConfig, hardware: Hardware) -> bool:
    """Return whether every engine receives from its own node."""
    parallel = config.parallel
    stage = max(parallel.tensor * parallel.context, parallel.expert)  # ranks next to each other; stages lie far apart
    near = parallel.world_size <= hardware.gpus or (parallel.pipeline == 1 and stage <= hardware.gpus)
    return near and colocated(config)
