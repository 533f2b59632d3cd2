"""Bytes of a trainer rank and of an engine's GPU, by part.

Weights, gradients and optimizer state are exact. Activations are a sum over the tensors that the layers save
(activations.py). The constants below are assumptions, rather too large than too small, until they have been measured.
"""

import math
from dataclasses import dataclass

from arpo_megatron.config import JobConfig, ParallelConfig
from arpo_megatron.hardware.placement import Placement, takes_turns
from arpo_megatron.hardware.specs import GIB, Hardware
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.plan.activations import Tokens, Widths, layer_bytes, pass_bytes, without_recompute
from arpo_megatron.plan.parameters import Parameters, optimizer_parameters, stage_parameters, whole_model
from arpo_megatron.plan.workload import Workload, trees_of_update

LOGITS = 1 << 28
"""Logits of one chunk on one rank: CUDA_CHUNK_ELEMENTS of actor/logprobs.py (a test compares them)."""
CUDA_CONTEXT = 0.75 * GIB
"""CUDA context and kernels of a process. Assumption."""
COLLECTIVES = 1.0 * GIB
"""NCCL's buffers for all groups of a rank. Assumption."""
RESERVE = 0.05
"""Share of a GPU's memory that the allocator cannot use, even with expandable segments. Assumption."""
ENGINE_WORKING = 2.5 * GIB
"""An engine's context, CUDA graphs and activations, in addition to its memory fraction. Assumption."""
ENGINE_AT_REST = 1.5 * GIB
"""Part of ENGINE_WORKING that a colocated engine keeps while the trainer trains. Assumption."""

STATIC = ("weights", "gradients", "optimizer", "fp8_copies")
"""Parts that stay on a trainer rank's GPU during rollouts."""
Parts = dict[str, float]

_KV_VALUE_BYTES: dict[object, int] = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bf16": 2, "bfloat16": 2}
"""Bytes of a key's or value's element by `engine.options.kv_cache_dtype`; of others, those of the model's dtype."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by part, of the fullest GPU."""

    training: Parts
    """GPU of a trainer rank during an update."""
    rollout: Parts
    """The same GPU during rollouts; empty for a cold start alone."""
    engine: Parts
    """GPU of an engine alone; empty if engines share the trainer's."""
    host: Parts
    """Host memory of a trainer rank."""
    kv_tokens: int
    """Capacity of an engine's KV pool, in tokens."""


def value_bytes(config: JobConfig) -> int:
    """Return the bytes of a parameter or activation."""
    return 4 if config.model.dtype == "float32" else 2


def colocated(config: JobConfig) -> bool:
    """Return whether engines share the trainer's GPUs. `auto` counts as colocated, because that takes fewer GPUs."""
    return takes_turns(config, enough=False)


def job_memory(config: JobConfig, spec: ModelSpec, hardware: Hardware, largest: Workload) -> Memory:
    """Return the bytes of a job whose trajectories all have the maximal length."""
    stages = [_training(config, spec, largest, stage) for stage in range(config.parallel.pipeline)]
    training = max(stages, key=lambda parts: sum(parts.values()))
    engine, kv_tokens = _engine(config, spec, hardware)
    common = process_parts(hardware.memory)
    if config.parallel.world_size > 1:
        common["collectives"] = COLLECTIVES
    if config.sft_only:  # without engines
        return Memory({**training, **common}, {}, {}, _host(config, spec), 0)
    static = {name: size for name, size in training.items() if name in STATIC}
    rollout: Parts = {**static, **common, "push_buckets": _push_buckets(config)}
    if colocated(config):
        rollout |= engine
        training = {**training, "engine_at_rest": ENGINE_AT_REST}
    alone = {} if colocated(config) else {**engine, "reserve": RESERVE * hardware.memory}
    return Memory({**training, **common}, rollout, alone, _host(config, spec), kv_tokens)


def static_parts(config: JobConfig, spec: ModelSpec, stage: int) -> Parts:
    """Return the bytes of a rank's weights, gradients and optimizer state.

    Gradients are float32 in Megatron's buffers. AdamW's state is two float32 moments and, in bfloat16, the float32
    weights. The distributed optimizer shards it over data- and context-parallel ranks (Megatron-LM's table: 6 + 12/d
    bytes per parameter), and experts' state over the ranks with the same experts.
    """
    held = stage_parameters(spec, config.parallel, stage)
    parts: Parts = {
        "weights": held.total * value_bytes(config),
        "gradients": held.total * 4.0,
        "optimizer": (1 - offloaded(config)) * _state(config, held),
    }
    if config.model.fp8 != "none":  # by rows and by columns, made in every update and kept between its packs
        share = 1 - 2 * config.model.bf16_edge_layers / spec.layers
        parts["fp8_copies"] = 2.0 * held.products * share
    return parts


def offloaded(config: JobConfig) -> float:
    """Return the share of the optimizer's state that is in host memory."""
    optimizer = config.sft.optimizer if config.sft_only else config.optimizer
    return optimizer.offload_fraction if optimizer.offload else 0.0


def checkpoint_bytes(config: JobConfig, spec: ModelSpec) -> int:
    """Return the bytes of a checkpoint on disk: all weights and AdamW's state, each once."""
    return (value_bytes(config) + _state_bytes(config)) * whole_model(spec).total


def weights_bytes(config: JobConfig, spec: ModelSpec) -> int:
    """Return the bytes of all weights on disk, without AdamW's state."""
    return value_bytes(config) * whole_model(spec).total


def _state_bytes(config: JobConfig) -> int:
    """Return the bytes of AdamW's state per parameter."""
    return 8 if config.model.dtype == "float32" else 12


def _state(config: JobConfig, held: Parameters) -> float:
    return _state_bytes(config) * optimizer_parameters(held, config.parallel)


def _training(config: JobConfig, spec: ModelSpec, largest: Workload, stage: int) -> Parts:
    live, pack, keys = _tokens(config, largest, stage)
    targets = pack * largest.sampled / largest.unique
    return update_parts(config, spec, Tokens(pack, keys), targets, live=live, stage=stage)


def update_parts(
    config: JobConfig, spec: ModelSpec, tokens: Tokens, targets: float, *, live: float, stage: int = 0
) -> Parts:
    """Return the bytes of a rank's tensors in an update.

    Args:
        config: the job.
        spec: sizes of the model.
        tokens: tokens of the largest pack on one rank.
        targets: its targets.
        live: most tokens of the rank whose activations are alive at once.
        stage: the rank's pipeline stage.
    """
    parallel, value = config.parallel, value_bytes(config)
    last = stage == parallel.pipeline - 1
    parts = static_parts(config, spec, stage) | pack_parts(config, spec, tokens, targets, last=last)
    parts["activations"] *= live / tokens.queries
    w = Widths.of(spec, parallel, value)
    inherited = tokens.keys - tokens.queries * parallel.context
    if inherited > 0:  # their keys and values, and the gradients of these in float32
        parts["activations"] += spec.layers // parallel.pipeline * inherited * 2 * w.keys * (value + 4)
    return parts


def process_parts(memory: float) -> Parts:
    """Return what the tensors of a process cannot use of a GPU's memory, in bytes."""
    return {"cuda_context": CUDA_CONTEXT, "reserve": RESERVE * memory}


def pack_parts(config: JobConfig, spec: ModelSpec, tokens: Tokens, targets: float, *, last: bool = True) -> Parts:
    """Return what the passes of one pack need beyond `static_parts`.

    Args:
        config: the job.
        spec: sizes of the model.
        tokens: tokens of the pack on one rank.
        targets: its targets.
        last: the stage has the output head.
    """
    parallel, value, fp8 = config.parallel, value_bytes(config), config.model.fp8 != "none"
    parts: Parts = {
        "activations": pass_bytes(spec, parallel, tokens, targets, value=value, last=last, fp8=fp8),
        "working": _layer_working(config, spec, tokens, Widths.of(spec, parallel, value), fp8=fp8),
    }
    if last:
        parts["logits"] = logits_bytes(spec, parallel, targets, value, fp32=config.model.fp32_head)
    return parts


def _tokens(config: JobConfig, largest: Workload, stage: int) -> tuple[float, float, float]:
    """Return for one rank: tokens with live activations, tokens of a pack, and keys that a pack attends to."""
    parallel, budget = config.parallel, config.train.token_budget
    pack = float(min(budget, largest.bound * trees_of_update(config)))
    keys = max(pack, largest.most_keys(config))
    # All packs of a tree, or of a part of it that holds the longest path.
    limit = math.inf if parallel.nested_packs else config.train.group_tokens or math.inf
    group = max(pack, min(float(largest.bound), max(limit, config.model.max_length)))
    if parallel.pipeline == 1:
        kept = group
    elif parallel.virtual_pipeline == 1:  # 1F1B runs ahead by the number of later stages (arXiv 2104.04473)
        kept = group * (parallel.pipeline - stage)
    else:  # interleaved: chunks of layers / v, of which 2 (p - s - 1) + (v - 1) p warm up and one runs
        ahead = 2 * (parallel.pipeline - stage - 1) + (parallel.virtual_pipeline - 1) * parallel.pipeline + 1
        kept = group * ahead / parallel.virtual_pipeline
    return kept / parallel.context, pack / parallel.context, keys


def _layer_working(config: JobConfig, spec: ModelSpec, tokens: Tokens, w: Widths, *, fp8: bool) -> float:
    """Return the bytes of a recomputed layer and of the gradients of its widest tensors."""
    parallel = config.parallel
    again = 0.0
    if parallel.recompute != "none":
        again = layer_bytes(spec, without_recompute(parallel), tokens, value=w.value, fp8=fp8)
    if parallel.recompute == "selective":  # the parts that the forward pass has not kept
        again -= layer_bytes(spec, parallel, tokens, value=w.value, fp8=fp8)
    visits = 1.0 if spec.experts is None else spec.experts.top_k * w.between / w.hidden
    gradients = tokens.queries * (visits * 3 * w.ffn + 2 * w.hidden) * w.value
    return again + gradients


def logits_bytes(spec: ModelSpec, parallel: ParallelConfig, targets: float, value: int, *, fp32: bool = False) -> float:
    """Return the bytes of a chunk of logits and of the head's weight gradient in the backward pass (actor/logprobs.py).

    The gradient of the logits overwrites them. If they are in float32 (`fp32`) and the parameters in bfloat16, it is
    then copied to the parameters' type. The weight's gradient exists in float32, and as the result in the parameters'
    type; in float32 as a chunk's part instead, because only TE's product adds in place.
    """
    rows = spec.vocabulary // parallel.tensor
    chunk = min(float(LOGITS), targets * rows)
    logit = 4 + value if fp32 and value < 4 else value
    return chunk * logit + rows * spec.hidden * (4 + value)


def _push_buckets(config: JobConfig) -> float:
    """Return the bytes of the two buckets of a weight push that a rank holds (weights/reshard.py)."""
    return 2 * config.sync.bucket_mib * 2.0**20


def engine_weights(config: JobConfig, spec: ModelSpec) -> float:
    """Return the bytes of an engine's weights on one GPU. In FP8 the layers' matrices take one byte per value."""
    whole = whole_model(spec)
    value = value_bytes(config)
    quantized = whole.products * (value - 1) if config.engine.quantization == "fp8" else 0
    return (whole.total * value - quantized) / config.engine.tensor


def kv_bytes(config: JobConfig, spec: ModelSpec) -> float:
    """Return the KV cache's bytes per token on one GPU of an engine. GPUs beyond the number of KV heads hold copies."""
    heads = max(1.0, spec.kv_heads / config.engine.tensor)
    options = {name.replace("-", "_"): value for name, value in config.engine.options.items()}
    value = _KV_VALUE_BYTES.get(options.get("kv_cache_dtype"), value_bytes(config))
    return 2.0 * spec.layers * heads * spec.head_dim * value


def _engine(config: JobConfig, spec: ModelSpec, hardware: Hardware) -> tuple[Parts, int]:
    """Return the parts of an engine and the tokens of its KV pool.

    SGLang's `mem-fraction-static` covers weights and pool; `engine.max_total_tokens` can make the pool smaller.
    """
    placement = Placement(gpus=hardware.gpus, engine_gpu=0, colocated=colocated(config))
    weights, token = engine_weights(config, spec), kv_bytes(config, spec)
    pool = placement.memory_fraction(config.engine) * hardware.memory - weights
    tokens = max(0, int(pool // token))
    if config.engine.max_total_tokens is not None:
        tokens = min(tokens, config.engine.max_total_tokens)
    parts = {"engine_weights": weights, "kv_cache": tokens * token, "engine_working": ENGINE_WORKING}
    return parts, tokens


def checkpoint_copy(config: JobConfig, spec: ModelSpec) -> float:
    """Return the bytes that the fullest rank copies to host memory for a checkpoint."""
    held = _fullest_stage(config, spec)
    return held.total * value_bytes(config) / config.parallel.data + _state(config, held)


def _fullest_stage(config: JobConfig, spec: ModelSpec) -> Parameters:
    stages = (stage_parameters(spec, config.parallel, stage) for stage in range(config.parallel.pipeline))
    return max(stages, key=lambda held: held.total)


def _host(config: JobConfig, spec: ModelSpec) -> Parts:
    """Return the host memory of the fullest rank: the copy for writing a checkpoint, and state that stays there."""
    held = _fullest_stage(config, spec)
    weights = held.total * value_bytes(config)
    parts: Parts = {"checkpoint_copy": checkpoint_copy(config, spec)}
    if share := offloaded(config):  # weights, two moments and gradients in float32 (Megatron's HybridDeviceOptimizer)
        parts["optimizer"] = share * 16.0 * optimizer_parameters(held, config.parallel)
    if config.algorithm.kl_coefficient:
        parts["reference_policy"] = 2.0 * weights  # and the policy's weights while it is swapped in
    return parts
