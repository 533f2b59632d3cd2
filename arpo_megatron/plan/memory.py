"""Bytes of a trainer rank and of an engine's GPU, by part.

Weights, gradients and optimizer state are counted exactly. What is kept for the backward pass is a sum over the tensors
that the layers save (activations.py). The constants below are assumptions until a GPU has been measured, on the large
side.
"""

from dataclasses import dataclass, replace

from arpo_megatron.config import JobConfig, ParallelConfig
from arpo_megatron.hardware.placement import Placement, takes_turns
from arpo_megatron.hardware.specs import GIB, Hardware
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.plan.activations import Tokens, Widths, layer_bytes, pass_bytes
from arpo_megatron.plan.parameters import Parameters, of_stage, updated, whole_model
from arpo_megatron.plan.workload import Workload

LOGITS = 1 << 26
"""Logits of one chunk on one rank: CHUNK_ELEMENTS of actor/logprobs.py (a test compares them)."""
CUDA_CONTEXT = 0.75 * GIB
"""A process's context and kernels. Assumption."""
COLLECTIVES = 1.0 * GIB
"""NCCL's buffers of all groups of a rank. Assumption."""
RESERVE = 0.05
"""Of a GPU's memory for what the allocator cannot fill, though its segments grow. Assumption."""
ENGINE_WORKING = 2.5 * GIB
"""An engine's context, CUDA graphs and activations, beside its fraction of the memory. Assumption."""
ENGINE_AT_REST = 1.5 * GIB
"""What a colocated engine keeps of that while the trainer trains. Assumption."""

STATIC = ("weights", "gradients", "optimizer", "fp8_copies")
"""What a trainer rank keeps on its GPU while trees grow."""
Parts = dict[str, float]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by part of the GPU that needs most.

    Attributes:
        training: of a trainer rank's GPU in an update.
        rollout: of the same GPU while trees grow; empty for a cold start alone.
        engine: of an engine's own GPU; empty where engines share the trainer's.
        host: of a trainer rank, in host memory.
        kv_tokens: what an engine's pool holds.
    """

    training: Parts
    rollout: Parts
    engine: Parts
    host: Parts
    kv_tokens: int


def value_bytes(config: JobConfig) -> int:
    """Of a parameter or activation."""
    return 4 if config.model.dtype == "float32" else 2


def shared(config: JobConfig) -> bool:
    """Whether engines compute on the trainer's GPUs; `auto` counts as that: it takes fewer GPUs."""
    return takes_turns(config, enough=False)


def of_job(config: JobConfig, spec: ModelSpec, hardware: Hardware, largest: Workload) -> Memory:
    """Bytes on this hardware when every trajectory is as long as allowed."""
    stages = [_training(config, spec, largest, stage) for stage in range(config.parallel.pipeline)]
    training = max(stages, key=lambda parts: sum(parts.values()))
    engine, kv_tokens = _engine(config, spec, hardware)
    common: Parts = {"cuda_context": CUDA_CONTEXT, "reserve": RESERVE * hardware.memory}
    if config.parallel.world_size > 1:
        common["collectives"] = COLLECTIVES
    if config.sft_only:  # without engines
        return Memory({**training, **common}, {}, {}, _host(config, spec), 0)
    static = {name: size for name, size in training.items() if name in STATIC}
    rollout: Parts = {**static, **common, "push_buckets": _push_buckets(config, spec)}
    if shared(config):
        rollout |= engine
        training = {**training, "engine_at_rest": ENGINE_AT_REST}
    alone = {} if shared(config) else {**engine, "reserve": RESERVE * hardware.memory}
    return Memory({**training, **common}, rollout, alone, _host(config, spec), kv_tokens)


def static_parts(config: JobConfig, spec: ModelSpec, stage: int) -> Parts:
    """Weights, gradients and optimizer state of a rank, in bytes.

    Gradients are float32 in Megatron's buffers. AdamW's state is two float32 moments and, in bfloat16, the float32
    weights; the distributed optimizer divides it among data- and context-parallel ranks (Megatron-LM's table for it:
    6 + 12/d bytes a parameter), experts' among those ranks that hold the same experts.
    """
    held = of_stage(spec, config.parallel, stage)
    parts: Parts = {
        "weights": held.total * value_bytes(config),
        "gradients": held.total * 4.0,
        "optimizer": (1 - offloaded(config)) * _state(config, held),
    }
    if config.model.fp8 != "none":  # rows and columns, made anew in every update and kept between its packs
        share = 1 - 2 * config.model.bf16_edge_layers / spec.layers
        parts["fp8_copies"] = 2.0 * held.products * share
    return parts


def offloaded(config: JobConfig) -> float:
    """Share of the optimizer's state that is in host memory."""
    optimizer = config.sft.optimizer if config.sft_only else config.optimizer
    return optimizer.offload_fraction if optimizer.offload else 0.0


def checkpoint_bytes(config: JobConfig, spec: ModelSpec) -> int:
    """Of one checkpoint on the disk: all weights and AdamW's state, each once."""
    return (value_bytes(config) + _state_bytes(config)) * whole_model(spec).total


def _state_bytes(config: JobConfig) -> int:
    """AdamW's of a parameter."""
    return 8 if config.model.dtype == "float32" else 12


def _state(config: JobConfig, held: Parameters) -> float:
    return _state_bytes(config) * updated(held, config.parallel)


def _training(config: JobConfig, spec: ModelSpec, largest: Workload, stage: int) -> Parts:
    parallel, value = config.parallel, value_bytes(config)
    kept, pack, keys = _tokens(config, largest, stage)
    fp8 = config.model.fp8 != "none"
    last = stage == parallel.pipeline - 1
    targets = pack * largest.sampled / largest.unique
    one = pass_bytes(spec, parallel, Tokens(pack, keys), targets, value=value, last=last, fp8=fp8)
    parts = static_parts(config, spec, stage)
    parts["activations"] = one * kept / pack
    w = Widths.of(spec, parallel, value)
    if keys > pack * parallel.context:  # keys and values handed down, and their gradients in float32
        handed = keys - pack * parallel.context
        parts["activations"] += spec.layers // parallel.pipeline * handed * 2 * w.keys * (value + 4)
    parts["working"] = _layer_working(config, spec, Tokens(pack, keys), w, fp8=fp8)
    if last:
        parts["logits"] = logits_bytes(spec, parallel, targets, value)
    return parts


def _tokens(config: JobConfig, largest: Workload, stage: int) -> tuple[float, float, float]:
    """On one rank: tokens whose activations live at once, tokens of a pack, keys that a pack attends to."""
    parallel, budget = config.parallel, config.train.token_budget
    packing = largest.packing(budget, nested=parallel.nested_packs)
    trees = -(-config.train.tasks_per_step // config.algorithm.minibatches)
    if config.sft_only:
        trees = config.sft.batch
    pack = float(min(budget, largest.bound * trees))
    keys = max(pack, packing.longest)
    if parallel.pipeline == 1:
        kept = max(pack, float(largest.bound))
    elif parallel.virtual_pipeline == 1:  # 1F1B runs ahead by the stages that follow (arXiv 2104.04473)
        kept = pack * (parallel.pipeline - stage)
    else:  # interleaved: chunks of layers / virtual stages, warm-up 2 (p - s - 1) + (v - 1) p and the one at work
        ahead = 2 * (parallel.pipeline - stage - 1) + (parallel.virtual_pipeline - 1) * parallel.pipeline + 1
        kept = pack * ahead / parallel.virtual_pipeline
    return kept / parallel.context, pack / parallel.context, keys


def _layer_working(config: JobConfig, spec: ModelSpec, tokens: Tokens, w: Widths, *, fp8: bool) -> float:
    """A layer that is computed again, and the gradients of its widest tensors; gathered inputs besides."""
    parallel = config.parallel
    again = 0.0
    if parallel.recompute != "none":
        again = layer_bytes(spec, replace(parallel, recompute="none"), tokens, value=w.value, fp8=fp8)
    visits = 1.0 if spec.experts is None else spec.experts.top_k * w.between / w.hidden
    gradients = tokens.queries * (visits * 3 * w.ffn + 2 * w.hidden) * w.value
    return again + gradients


def logits_bytes(spec: ModelSpec, parallel: ParallelConfig, targets: float, value: int) -> float:
    """The head's chunk of logits, and the gradient of its weight, in the backward pass (actor/logprobs.py).

    Logits in the parameters' type, in float32 and as a gradient; the weight's gradient in float32, a chunk's part of
    it and the result in the parameters' type. The forward pass holds a little more logits and no gradient.
    """
    rows = spec.vocabulary // parallel.tensor
    chunk = min(float(LOGITS), targets * rows)
    backward = chunk * (4 + 2 * value) + rows * spec.hidden * (4 + 2 * value)
    return max(backward, chunk * (2 * value + 8))


def _push_buckets(config: JobConfig, spec: ModelSpec) -> float:
    """On the first rank: two buckets (weights/export.py), one of them shared with the engine where it has to hold the
    largest tensor whole. Gate and up projection are one bucket for an engine that quantizes.
    """
    bucket = config.sync.bucket_mb * 2.0**20
    if config.engine.quantization != "none":
        bucket = max(bucket, 2.0 * spec.ffn * spec.hidden * value_bytes(config))
    if config.sync.transport == "ipc" or (config.sync.transport == "auto" and shared(config)):
        return bucket + max(bucket, spec.vocabulary * spec.hidden * value_bytes(config))
    return 2 * bucket


def engine_weights(config: JobConfig, spec: ModelSpec) -> float:
    """Of one GPU of an engine; in FP8 the layers' products are half as large."""
    whole = whole_model(spec)
    value = value_bytes(config)
    quantized = whole.products * (value - 1) if config.engine.quantization == "fp8" else 0
    return (whole.total * value - quantized) / config.engine.tensor


def kv_bytes(config: JobConfig, spec: ModelSpec) -> float:
    """Of one token on one GPU of an engine; more GPUs than key heads hold copies."""
    heads = max(1.0, spec.kv_heads / config.engine.tensor)
    return 2.0 * spec.layers * heads * spec.head_dim * value_bytes(config)


def _engine(config: JobConfig, spec: ModelSpec, hardware: Hardware) -> tuple[Parts, int]:
    """SGLang's `mem-fraction-static` is for weights and pool together; a smaller pool may be asked for."""
    placement = Placement(gpus=hardware.gpus, engine_gpu=0, shared=shared(config))
    weights, token = engine_weights(config, spec), kv_bytes(config, spec)
    pool = placement.memory_fraction(config.engine) * hardware.memory - weights
    tokens = max(0, int(pool // token))
    if config.engine.max_total_tokens is not None:
        tokens = min(tokens, config.engine.max_total_tokens)
    parts = {"engine_weights": weights, "kv_cache": tokens * token, "engine_working": ENGINE_WORKING}
    return parts, tokens


def _host(config: JobConfig, spec: ModelSpec) -> Parts:
    """Of the rank with most: the copy that a checkpoint is written from, and what is kept there for good."""
    stages = [of_stage(spec, config.parallel, stage) for stage in range(config.parallel.pipeline)]
    held = max(stages, key=lambda found: found.total)
    weights = held.total * value_bytes(config)
    state = _state(config, held)
    parts: Parts = {"checkpoint_copy": weights / config.parallel.data + state}
    if share := offloaded(config):  # weights, two moments and gradients in float32 (Megatron's HybridDeviceOptimizer)
        parts["optimizer"] = share * 16.0 * updated(held, config.parallel)
    if config.algorithm.kl_coefficient:
        parts["reference_policy"] = 2.0 * weights  # and the own weights while it is swapped in
    return parts
