"""The plan of a job: sizes, memory and time on some hardware, and whether it fits. Nothing is fetched or started."""

from dataclasses import asdict, dataclass
from typing import Any

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.plan import memory, timing
from arpo_megatron.plan.hardware import GIB, Hardware
from arpo_megatron.plan.nodes import Nodes, nodes_of
from arpo_megatron.plan.parameters import active, of_stage, whole_model
from arpo_megatron.plan.workload import cold_start_only, largest, typical
from arpo_megatron.weights.known_shapes import shape_of
from arpo_megatron.weights.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job needs.

    Attributes:
        config: of the job.
        hardware: that it would run on.
        nodes: how many.
        parameters: of the model.
        active_parameters: that a token meets.
        rank_parameters: of the trainer rank with most.
        memory: bytes by part, of the GPU that needs most.
        step_seconds: of one step (update of a cold start) by phase.
        seconds: of one whole step.
        decode_batch: paths that decode at once in an engine.
        tokens: of a step's trees, each once.
        steps: of the whole job.
        reason: why it does not fit; None where it does.
    """

    config: JobConfig
    hardware: Hardware
    nodes: Nodes
    parameters: int
    active_parameters: int
    rank_parameters: int
    memory: memory.Memory
    step_seconds: dict[str, float]
    seconds: float
    decode_batch: float
    tokens: float
    steps: int
    reason: str | None

    @property
    def fits(self) -> bool:
        """Whether the job can run there."""
        return self.reason is None

    @property
    def gpu_hours(self) -> float:
        """Of the whole job, without evaluations and checkpoints."""
        return self.steps * self.seconds * self.nodes.total * self.hardware.gpus / 3600

    @property
    def peak_bytes(self) -> float:
        """Of the GPU that needs most, in the phase in which it does."""
        return max(sum(parts.values()) for parts in (self.memory.training, self.memory.rollout, self.memory.engine))

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, for `arpo plan --json`."""
        return {
            "recipe": self.config.name,
            "model": self.config.model.hub_id,
            "gpu": self.hardware.name,
            "nodes": self.nodes.total,
            "trainer_nodes": self.nodes.trainer,
            "engine_nodes": self.nodes.engine,
            "gpus": self.nodes.gpus,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "parameters_per_rank": self.rank_parameters,
            "parallel": asdict(self.config.parallel),
            "memory_per_rank_bytes": _whole(self.memory.training),
            "memory_in_rollout_bytes": _whole(self.memory.rollout),
            "memory_of_engine_bytes": _whole(self.memory.engine),
            "host_memory_per_rank_bytes": _whole(self.memory.host),
            "memory_of_gpu_bytes": round(self.hardware.memory),
            "kv_cache_tokens": self.memory.kv_tokens,
            "decode_batch": round(self.decode_batch),
            "tokens_per_step": round(self.tokens),
            "step_seconds": {name: round(seconds, 3) for name, seconds in self.step_seconds.items()},
            "seconds_per_step": round(self.seconds, 3),
            "steps": self.steps,
            "gpu_hours": round(self.gpu_hours, 1),
            "fits": self.fits,
            "reason": self.reason,
        }


def plan(config: JobConfig, hardware: Hardware) -> Plan:
    """The plan of a job.

    Raises:
        UserError: the model's sizes are not known (no files at `model.path`, no known `model.hub_id`).
    """
    shape = shape_of(config.model)
    reason = impossible(config, shape, hardware)
    work, most = typical(config), largest(config)
    trees = config.sft.batch if cold_start_only(config) else config.train.tasks_per_step
    needs = memory.of_job(config, shape, hardware, most)
    phases = timing.of_step(config, shape, hardware, work, needs.kv_tokens)
    held = [of_stage(shape, config.parallel, stage).total for stage in range(config.parallel.pipeline)]
    return Plan(
        config=config,
        hardware=hardware,
        nodes=nodes_of(config, hardware.gpus),
        parameters=whole_model(shape).total,
        active_parameters=active(shape),
        rank_parameters=max(held),
        memory=needs,
        step_seconds=phases,
        seconds=timing.step_seconds(config, phases),
        decode_batch=timing.decoding(config, shape, hardware, work, needs.kv_tokens).batch,
        tokens=trees * work.unique,
        steps=config.sft.steps if cold_start_only(config) else config.train.steps,
        reason=reason or too_large(config, needs, hardware),
    )


def impossible(config: JobConfig, shape: ModelShape, hardware: Hardware) -> str | None:
    """Why the layout cannot work with this model on this hardware, whatever the memory; None where it can."""
    parallel, engine = config.parallel, config.engine
    try:
        shape.check_divisible(parallel)
        shape.check_fp8(config.model, parallel)
        shape.check_engine(engine)
        shape.check_replay(config.algorithm)
    except UserError as error:
        return str(error)
    if config.model.fp8 != "none" and not hardware.fp8:
        return f"model.fp8={config.model.fp8}: {hardware.name} has no FP8 products"
    engines = engine.tensor * engine.replicas
    if memory.shared(config) and engines > parallel.world_size:
        return f"engines on {engines} GPUs cannot be colocated with {parallel.world_size} trainer ranks"
    return _engine_impossible(engine.tensor, shape, hardware)


def _engine_impossible(tensor: int, shape: ModelShape, hardware: Hardware) -> str | None:
    if tensor > hardware.gpus:
        return f"engine.tensor={tensor} exceeds the {hardware.gpus} GPUs of a node"
    for what, size in (("query heads", shape.heads), ("vocabulary", shape.vocabulary)):
        if size % tensor:
            return f"the model's {what} ({size}) cannot be divided by engine.tensor={tensor}"
    if max(shape.kv_heads, tensor) % min(shape.kv_heads, tensor):  # more GPUs than heads hold copies
        return f"the model's key/value heads ({shape.kv_heads}) cannot be divided by engine.tensor={tensor}"
    return None


def too_large(config: JobConfig, needs: memory.Memory, hardware: Hardware) -> str | None:
    """Which memory is too small; None where all is enough."""
    for phase, parts in (("training", needs.training), ("rollout", needs.rollout), ("engine", needs.engine)):
        total = sum(parts.values())
        if total > hardware.memory:
            name, size = max(parts.items(), key=lambda part: part[1])
            return (
                f"{phase} needs {total / GIB:.1f} GiB of a GPU's {hardware.memory / GIB:.1f} "
                f"(most of it {name}, {size / GIB:.1f})"
            )
    if not cold_start_only(config) and needs.kv_tokens < config.model.max_length:
        return (
            f"an engine's KV pool holds {needs.kv_tokens} tokens, fewer than model.max_length="
            f"{config.model.max_length}: give engine.memory_fraction or engine.tensor"
        )
    ranks = min(hardware.gpus, config.parallel.world_size)
    host = ranks * sum(needs.host.values())
    if host > hardware.host_memory:
        return f"trainer ranks need {host / GIB:.0f} GiB of a node's {hardware.host_memory / GIB:.0f}"
    return None


def _whole(parts: memory.Parts) -> dict[str, int]:
    return {name: round(size) for name, size in parts.items()}
