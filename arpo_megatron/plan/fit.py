"""The plan of a job: sizes, memory and time on given hardware, and whether it fits. Nothing is downloaded."""

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
from arpo_megatron.plan.parameters import active_parameters, stage_parameters, whole_model
from arpo_megatron.plan.passes import Parts
from arpo_megatron.plan.slowest_rank import slowest_rank
from arpo_megatron.plan.workload import Workload, largest, trees_of_update, typical


@dataclass(frozen=True, slots=True)
class Unfit:
    """The reason why a job cannot run."""

    kind: str
    """Reason without numbers, equal for all layouts that fail in the same way."""
    text: str
    """Reason with this layout's numbers."""


@dataclass(frozen=True, slots=True)
class JobEstimate:
    """The needs of a job on given hardware."""

    config: JobConfig
    hardware: Hardware
    layout: NodeLayout | None
    """Nodes of the processes; None if they cannot be laid out (see `reason`)."""
    parameters: int
    active_parameters: int
    """Parameters that process one token; fewer than all for a mixture of experts."""
    rank_parameters: int
    """Parameters of the trainer rank with most."""
    memory: memory.Memory
    """Bytes by part of the fullest GPU."""
    seconds_by_part: dict[str, Parts]
    """Seconds of one step (of one update, for a cold start) by phase and part."""
    seconds: float
    """Seconds of one whole step, in which phases may overlap."""
    decode_batch: float
    """Paths that an engine decodes at once; 0 without engines."""
    tokens: float
    """Tokens of a step's trees, each counted once."""
    repeated: float
    """Share of the tokens that the trainer computes that are repeated ancestors (`train.group_tokens`)."""
    steps: int
    start_seconds: float
    """Seconds from the start of the job to its first step."""
    imbalance: float
    """Work of the slowest data-parallel rank over the mean, minus 1, in a typical update."""
    unfit: Unfit | None
    """Reason why the job does not fit; None if it fits."""

    @property
    def fits(self) -> bool:
        """Whether the job can run; if not, `reason` has the cause."""
        return self.unfit is None

    @property
    def reason(self) -> str | None:
        """Reason why the job does not fit; None if it fits."""
        return self.unfit.text if self.unfit else None

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds of one step by phase, with the names of a run's metrics (`seconds/NAME`)."""
        return {phase: sum(parts.values()) for phase, parts in self.seconds_by_part.items()}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Resources that the job would waste."""
        data, trees = self.config.parallel.data, trees_of_update(self.config)
        if data <= trees:
            return ()
        what = f"{trees} {'conversations' if self.config.sft_only else 'trees'} an update"
        return (f"parallel.data={data}, but {what}: {data - trees} of {data} ranks wait; raise tensor or pipeline",)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the whole job in one allocation, without evaluations."""
        return (self.start_seconds + self.steps * self.seconds) * self.gpus / 3600

    @property
    def gpus(self) -> int:
        """Number of GPUs that the job occupies: whole nodes, or those in use on a part of one node."""
        return self.layout.gpus_used if self.layout and self.nodes == 1 else self.nodes * self.hardware.gpus

    @property
    def nodes(self) -> int:
        """Number of nodes; without a layout, the number that the trainer's ranks fill."""
        return self.layout.nodes if self.layout else -(-self.config.parallel.world_size // self.hardware.gpus)

    @property
    def peak_bytes(self) -> float:
        """Largest number of bytes on any GPU in any phase."""
        return max(sum(parts.values()) for parts in (self.memory.training, self.memory.rollout, self.memory.engine))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values for `arpo plan --json`."""
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
            "repeated_share": round(self.repeated, 3),
            "seconds_by_phase": _rounded(self.seconds_by_phase),
            "seconds_by_part": {phase: _rounded(parts) for phase, parts in self.seconds_by_part.items()},
            "imbalance": round(self.imbalance, 3),
            "seconds_per_step": round(self.seconds, 3),
            "start_seconds": round(self.start_seconds),
            "steps": self.steps,
            "gpu_hours": round(self.gpu_hours, 1),
            "fits": self.fits,
            "reason": self.reason,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True)
class Workloads:
    """The trees that a plan counts, which a layout does not change."""

    typical: Workload
    """Trees for estimates of time."""
    largest: Workload
    """Trees for estimates of memory."""

    @classmethod
    def of(cls, config: JobConfig) -> "Workloads":
        """Return the trees of a job."""
        return cls(typical(config), largest(config))


def plan(
    config: JobConfig, hardware: Hardware, nodes: int | None = None, *, workloads: Workloads | None = None
) -> JobEstimate:
    """Plan a job.

    Args:
        config: config of the job. The plan's config has the placement for `engine.placement=auto`.
        hardware: node to run on.
        nodes: number of nodes; None for as few as possible.
        workloads: `Workloads.of(config)`, for a caller that plans many layouts.

    Raises:
        UserError: the model's sizes are unknown (no files at `model.path`, no known `model.hub_id`), or `sandbox.file`
            cannot be used, or the layout does not divide the model, on whatever hardware.
    """
    spec = load_spec(config.model)
    spec.check_divisible(config.parallel)
    layout, unfit = None, find_conflict(config, spec, hardware)
    if unfit is None:
        try:
            layout = lay_out_nodes(replace(config, platform="auto"), hardware.gpus, nodes)
            config = with_placement(config, layout)
        except UserError as error:
            unfit = Unfit("the job cannot be laid out on the nodes", str(error))
    trees_of = workloads or Workloads.of(config)
    work, most = trees_of.typical, trees_of.largest
    alone = config.sft_only
    trees = config.sft.batch if alone else config.train.tasks_per_step
    needs = memory.job_memory(config, spec, hardware, most)
    phases = timing.phase_seconds(config, spec, hardware, work, needs.kv_tokens)
    held = [stage_parameters(spec, config.parallel, stage).total for stage in range(config.parallel.pipeline)]
    count, per_update = layout.nodes if layout else 1, trees_of_update(config)
    return JobEstimate(
        config=config,
        hardware=hardware,
        layout=layout,
        parameters=whole_model(spec).total,
        active_parameters=active_parameters(spec),
        rank_parameters=max(held),
        memory=needs,
        seconds_by_part=phases,
        seconds=timing.step_seconds(config, phases),
        decode_batch=0.0 if alone else timing.decoding(config, spec, hardware, work, needs.kv_tokens).batch,
        tokens=trees * work.unique,
        repeated=1 - work.unique / work.packing(config, spec).computed,
        steps=config.sft.steps if alone else config.train.steps,
        start_seconds=timing.start_seconds(spec, hardware, count, memory.value_bytes(config)),
        imbalance=slowest_rank(config, spec, work, per_update) * config.parallel.data / per_update - 1,
        unfit=unfit or find_shortage(config, needs, hardware),
    )


def find_conflict(config: JobConfig, spec: ModelSpec, hardware: Hardware) -> Unfit | None:
    """Return why the layout cannot work with this model and hardware even with enough memory, or None."""
    try:
        spec.check_divisible(config.parallel)
        spec.check_fp8(config.model, config.parallel)
        spec.check_attention(config.model)
        spec.check_replay(config.algorithm)
        if not config.sft_only:
            spec.check_engine(config.engine, config.parallel)
    except UserError as error:
        return conflict(str(error))
    if config.model.fp8 != "none" and not hardware.fp8:
        return conflict(f"model.fp8={config.model.fp8}: {hardware.name} has no FP8 products")
    if config.engine.quantization == "fp8" and not config.sft_only and not hardware.fp8:
        return conflict(
            f"engine.quantization=fp8: {hardware.name} has no FP8 products, and SGLang would rearrange the weights, "
            "which a push replaces"
        )
    return None if config.sft_only else _engines_impossible(config, spec, hardware)


def conflict(text: str) -> Unfit:
    """Make an Unfit from an error message. Its kind is the message without numbers."""
    return Unfit(re.sub(r"\d+", "N", text.split(":", maxsplit=1)[0]), text)


def _engines_impossible(config: JobConfig, spec: ModelSpec, hardware: Hardware) -> Unfit | None:
    engine, ranks = config.engine, config.parallel.world_size
    tensor, engines = engine.tensor, engine.tensor * engine.replicas
    if memory.colocated(config) and engines > ranks:
        return conflict(f"colocated engines need more GPUs than there are trainer ranks: {engines} GPUs, {ranks} ranks")
    if tensor > hardware.gpus:
        return conflict(f"engine.tensor={tensor} exceeds the {hardware.gpus} GPUs of a node")
    for what, size in (("query heads", spec.heads), ("vocabulary", spec.vocabulary)):
        if size % tensor:
            return conflict(f"the model's {what} ({size}) cannot be divided by engine.tensor={tensor}")
    if max(spec.kv_heads, tensor) % min(spec.kv_heads, tensor):  # GPUs beyond the number of heads hold copies
        return conflict(f"the model's key/value heads ({spec.kv_heads}) cannot be divided by engine.tensor={tensor}")
    return None


UPDATE_TOO_LARGE = "an update needs more memory than a GPU has"
TOGETHER_TOO_LARGE = "trainer and engine together need more memory than a GPU has"


def find_shortage(config: JobConfig, needs: memory.Memory, hardware: Hardware) -> Unfit | None:
    """Return which memory is too small, or None."""
    for kind, phase, parts in (
        (UPDATE_TOO_LARGE, "training", needs.training),
        (TOGETHER_TOO_LARGE, "rollout", needs.rollout),
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
            f"{config.model.max_length}: raise engine.memory_fraction or engine.tensor",
        )
    ranks = min(hardware.gpus, config.parallel.world_size)
    host = ranks * sum(needs.host.values())
    if host > hardware.host_memory:
        return Unfit(
            "the ranks need more host memory than a node has",
            f"trainer ranks need {host / GIB:.0f} GiB of a node's {hardware.host_memory / GIB:.0f}",
        )
    return None


def _rounded(seconds: Parts) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


def _whole(parts: memory.Parts) -> dict[str, int]:
    return {name: round(size) for name, size in parts.items()}
