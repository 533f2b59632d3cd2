"""The plan of a job: sizes, memory and time on some hardware, and whether it fits. Nothing is fetched or started."""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.specs import GIB, Hardware
from arpo_megatron.models.known import load_spec
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.plan import memory, timing
from arpo_megatron.plan.node_layout import NodeLayout, lay_out_nodes, with_placement
from arpo_megatron.plan.parameters import active, of_stage, whole_model
from arpo_megatron.plan.workload import largest, typical


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why a job cannot run.

    Attributes:
        kind: the same for all layouts that fail so.
        text: with the figures of this one.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job needs.

    Attributes:
        config: of the job.
        hardware: that it would run on.
        layout: where the processes run; None: nowhere (`reason` says why).
        parameters: of the model.
        active_parameters: that a token meets.
        rank_parameters: of the trainer rank with most.
        memory: bytes by part, of the GPU that needs most.
        step_seconds: of one step (update of a cold start) by phase.
        seconds: of one whole step.
        decode_batch: paths that decode at once in an engine; 0 without engines.
        tokens: of a step's trees, each once.
        steps: of the whole job.
        unfit: why it does not fit; None where it does.
    """

    config: JobConfig
    hardware: Hardware
    layout: NodeLayout | None
    parameters: int
    active_parameters: int
    rank_parameters: int
    memory: memory.Memory
    step_seconds: dict[str, float]
    seconds: float
    decode_batch: float
    tokens: float
    steps: int
    unfit: Unfit | None

    @property
    def fits(self) -> bool:
        """Whether the job can run there."""
        return self.unfit is None

    @property
    def reason(self) -> str | None:
        """Why it does not fit; None where it does."""
        return self.unfit.text if self.unfit else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wasted by a job that can run."""
        config, data = self.config, self.config.parallel.data
        alone = config.sft_only
        trees = config.sft.batch if alone else config.train.tasks_per_step // config.algorithm.minibatches
        if data <= trees:
            return ()
        what = f"{trees} {'conversations' if alone else 'trees'} an update"
        return (f"parallel.data={data}, but {what}: {data - trees} of {data} ranks wait; give tensor or pipeline",)

    @property
    def gpu_hours(self) -> float:
        """Of the whole job, without evaluations and checkpoints."""
        return self.steps * self.seconds * self.nodes * self.hardware.gpus / 3600

    @property
    def nodes(self) -> int:
        """Of the allocation; where roles have no place on any, as many as the trainer's ranks make."""
        return self.layout.nodes if self.layout else -(-self.config.parallel.world_size // self.hardware.gpus)

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
            "nodes": self.nodes,
            "trainer_nodes": self.layout and self.layout.trainer_nodes,
            "engine_nodes": self.layout and self.layout.engine_nodes,
            "gpus": self.layout and self.layout.gpus_used,
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
            "warnings": list(self.warnings),
        }


def plan(config: JobConfig, hardware: Hardware, nodes: int | None = None) -> Plan:
    """The plan of a job.

    Args:
        config: of the job; with `engine.placement=auto` the plan's own says what that comes to.
        hardware: that it would run on.
        nodes: how many; None: as few as can be.

    Raises:
        UserError: the model's sizes are not known (no files at `model.path`, no known `model.hub_id`).
    """
    spec = load_spec(config.model)
    layout, unfit = None, impossible(config, spec, hardware)
    if unfit is None:
        try:
            layout = lay_out_nodes(replace(config, platform="auto"), hardware.gpus, nodes)
            config = with_placement(config, layout)
        except UserError as error:
            unfit = Unfit("the roles cannot be laid over the nodes", str(error))
    work, most = typical(config), largest(config)
    alone = config.sft_only
    trees = config.sft.batch if alone else config.train.tasks_per_step
    needs = memory.of_job(config, spec, hardware, most)
    phases = timing.of_step(config, spec, hardware, work, needs.kv_tokens)
    held = [of_stage(spec, config.parallel, stage).total for stage in range(config.parallel.pipeline)]
    return Plan(
        config=config,
        hardware=hardware,
        layout=layout,
        parameters=whole_model(spec).total,
        active_parameters=active(spec),
        rank_parameters=max(held),
        memory=needs,
        step_seconds=phases,
        seconds=timing.step_seconds(config, phases),
        decode_batch=0.0 if alone else timing.decoding(config, spec, hardware, work, needs.kv_tokens).batch,
        tokens=trees * work.unique,
        steps=config.sft.steps if alone else config.train.steps,
        unfit=unfit or too_large(config, needs, hardware),
    )


def impossible(config: JobConfig, spec: ModelSpec, hardware: Hardware) -> Unfit | None:
    """Why the layout cannot work with this model on this hardware, whatever the memory; None where it can."""
    try:
        spec.check_divisible(config.parallel)
        spec.check_fp8(config.model, config.parallel)
        spec.check_replay(config.algorithm)
        if not config.sft_only:
            spec.check_engine(config.engine)
    except UserError as error:
        return refused(str(error))
    if config.model.fp8 != "none" and not hardware.fp8:
        return refused(f"model.fp8={config.model.fp8}: {hardware.name} has no FP8 products")
    return None if config.sft_only else _engines_impossible(config, spec, hardware)


def refused(text: str) -> Unfit:
    """What a check says of a layout; without its figures it says the same of others."""
    return Unfit(re.sub(r"\d+", "N", text.split(":", maxsplit=1)[0]), text)


def _engines_impossible(config: JobConfig, spec: ModelSpec, hardware: Hardware) -> Unfit | None:
    engine, ranks = config.engine, config.parallel.world_size
    tensor, engines = engine.tensor, engine.tensor * engine.replicas
    if memory.shared(config) and engines > ranks:
        return refused(f"colocated engines take more GPUs than there are trainer ranks: {engines}, and {ranks} ranks")
    if tensor > hardware.gpus:
        return refused(f"engine.tensor={tensor} exceeds the {hardware.gpus} GPUs of a node")
    for what, size in (("query heads", spec.heads), ("vocabulary", spec.vocabulary)):
        if size % tensor:
            return refused(f"the model's {what} ({size}) cannot be divided by engine.tensor={tensor}")
    if max(spec.kv_heads, tensor) % min(spec.kv_heads, tensor):  # more GPUs than heads hold copies
        return refused(f"the model's key/value heads ({spec.kv_heads}) cannot be divided by engine.tensor={tensor}")
    return None


UPDATE_TOO_LARGE = "an update needs more memory than a GPU has"


def too_large(config: JobConfig, needs: memory.Memory, hardware: Hardware) -> Unfit | None:
    """Which memory is too small; None where all is enough."""
    for kind, phase, parts in (
        (UPDATE_TOO_LARGE, "training", needs.training),
        ("trainer and engine together need more memory than a GPU has", "rollout", needs.rollout),
        ("an engine needs more memory than a GPU has", "engine", needs.engine),
    ):
        total = sum(parts.values())
        if total > hardware.memory:
            name, size = max(parts.items(), key=lambda part: part[1])
            return Unfit(
                kind,
                f"{phase} needs {total / GIB:.1f} GiB of a GPU's {hardware.memory / GIB:.1f} "
                f"(most of it {name}, {size / GIB:.1f})",
            )
    if not config.sft_only and needs.kv_tokens < config.model.max_length:
        return Unfit(
            "the KV pool cannot hold one trajectory",
            f"an engine's KV pool holds {needs.kv_tokens} tokens, fewer than model.max_length="
            f"{config.model.max_length}: give engine.memory_fraction or engine.tensor",
        )
    ranks = min(hardware.gpus, config.parallel.world_size)
    host = ranks * sum(needs.host.values())
    if host > hardware.host_memory:
        return Unfit(
            "the ranks need more host memory than a node has",
            f"trainer ranks need {host / GIB:.0f} GiB of a node's {hardware.host_memory / GIB:.0f}",
        )
    return None


def _whole(parts: memory.Parts) -> dict[str, int]:
    return {name: round(size) for name, size in parts.items()}
