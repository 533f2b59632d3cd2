"""Layouts of the same job on the same GPUs: the fastest that fit, and why the others do not."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import floor
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from arpo_megatron.actor.flops import Recompute
from arpo_megatron.config import JobConfig, ParallelConfig
from arpo_megatron.errors import UserError
from arpo_megatron.plan.fit import UPDATE_TOO_LARGE, Plan, impossible, plan, refused
from arpo_megatron.plan.hardware import Hardware
from arpo_megatron.plan.memory import shared
from arpo_megatron.plan.roles import plan_roles
from arpo_megatron.resolve import Source, layers, over, resolve, said_keys, variant_names
from arpo_megatron.weights.known_shapes import shape_of

FRACTIONS = (0.85, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Of a GPU's memory for an engine; the largest that fits is taken."""

RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
"""`selective` would save little: FlexAttention keeps no scores."""


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search.

    Attributes:
        of: the job whose layouts were searched.
        best: plans that fit, fastest first, each with another division of the model.
        tried: layouts looked at.
        fit: how many of them fit.
        failed: why the others do not, and how many for each reason; the commonest first.
    """

    of: JobConfig
    best: tuple[Plan, ...]
    tried: int
    fit: int
    failed: tuple[tuple[str, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, for `arpo plan --json`."""
        return {
            "best": [plan.to_dict() for plan in self.best],
            "tried": self.tried,
            "fit": self.fit,
            "failed": dict(self.failed),
        }


def search(config: JobConfig, hardware: Hardware, *, best: int = 5) -> Found:
    """Tries tensor, pipeline, virtual pipeline, context and expert parallelism, packs, recomputation and engine sizes.

    The number of trainer ranks and of engine GPUs stays; ranks that are left over are data-parallel.
    """
    shape = shape_of(config.model)
    engines = config.engine.tensor * config.engine.replicas
    sizes = [config.engine.tensor] if config.cold_start_only else _powers(min(hardware.gpus, engines))
    fitting: list[Plan] = []
    failed: Counter[str] = Counter()
    tried = 0
    for parallel, budget in product(_layouts(config, hardware, shape.experts is not None), _budgets(config)):
        for tensor in sizes:
            tried += 1
            if engines % tensor:
                failed["engine GPUs cannot be divided so"] += 1
                continue
            try:
                job = replace(
                    config,
                    parallel=parallel,
                    train=replace(config.train, token_budget=budget),
                    engine=replace(config.engine, tensor=tensor, replicas=engines // tensor),
                )
            except ValidationError as error:
                failed[_said(error)] += 1
                continue
            if unfit := impossible(job, shape, hardware):
                failed[unfit.kind] += 1
                continue
            candidate = _largest_pool(job, hardware)
            if candidate.unfit is None:
                fitting.append(candidate)
            else:
                failed[candidate.unfit.kind] += 1
    # Among equals the layout with fewer dimensions; rounded, because the times are estimates.
    fitting.sort(key=lambda found: (round(found.seconds, 1), _dimensions(found.config.parallel), found.peak_bytes))
    return Found(config, tuple(_unlike(fitting)[:best]), tried, len(fitting), tuple(failed.most_common()))


def on_nodes(
    recipe: str, nodes: int | None, gpus_per_node: int, *, file: Path | None = None, words: Sequence[str] = ()
) -> JobConfig:
    """A recipe on so many nodes: in its own layout for them, else in the one it has with more or fewer ranks.

    The recipe's own is taken where its placement is the job's and no variant that was asked for is a layout too. What
    the user has said of a job is never changed; `plan_roles` says where that and the nodes do not agree.

    Raises:
        UserError: as `resolve.resolve`, or the layout cannot fill the nodes.
    """
    job = resolve(recipe, file=file, words=words)
    if nodes is None:
        return job
    asked = layers(recipe, file=file, words=words)
    chosen = {key for layer in asked if layer.source is Source.VARIANT for key in layer.keys}
    own = f"{nodes}node{'s' if nodes > 1 else ''}"
    if "parallel.data" not in chosen and own in variant_names(recipe.split("+", maxsplit=1)[0]):
        laid = f"{recipe}+{own}"
        if resolve(laid).engine.placement == job.engine.placement:
            job = resolve(laid, file=file, words=words)
    said = said_keys([layer for layer in asked if layer.source is not Source.VARIANT])
    return scaled(job, nodes, gpus_per_node, keep=said)


def scaled(config: JobConfig, nodes: int, gpus_per_node: int, keep: Collection[str] = ()) -> JobConfig:
    """The job on so many nodes: as it is where these are what it takes, else with other numbers of ranks and engines.

    Data-parallel ranks and engines are as many as fill the nodes. Split ones share them out as they do now, in whole
    nodes where there are several. With one of the two numbers among the keys to `keep` the job stays as it is.

    Raises:
        UserError: the GPUs are no multiple of what one data-parallel rank or one engine takes.
    """
    if {"parallel.data", "engine.replicas"} & set(keep) or _takes(config, nodes, gpus_per_node):
        return config
    parallel, engine, gpus = config.parallel, config.engine, nodes * gpus_per_node
    ranks = engines = gpus
    if not shared(config):
        unit = 1 if nodes == 1 else gpus_per_node
        now = parallel.world_size / (parallel.world_size + engine.tensor * engine.replicas)
        ranks = max(1, floor(now * gpus / unit)) * unit
        engines = gpus - ranks
    block = parallel.tensor * parallel.pipeline * parallel.context
    replicas = engine.replicas if config.cold_start_only else engines // engine.tensor
    if ranks % block or not replicas or (engines % engine.tensor and not config.cold_start_only):
        raise UserError(
            f"{nodes} node(s) with {gpus_per_node} GPUs cannot be divided into tensor {parallel.tensor} x context "
            f"{parallel.context} x pipeline {parallel.pipeline} and engines of {engine.tensor}: give parallel.data and "
            "engine.replicas too"
        )
    return over(config, [f"parallel.data={ranks // block}", f"engine.replicas={replicas}"])


def _takes(config: JobConfig, nodes: int, gpus_per_node: int) -> bool:
    try:
        plan_roles(replace(config, platform="auto"), gpus_per_node, nodes)
    except UserError:
        return False
    return True


def _unlike(fitting: list[Plan]) -> list[Plan]:
    """Of each division of the model and the trees the first, whatever its packs, recomputation and engines."""
    first: dict[tuple[int, ...], Plan] = {}
    for found in fitting:
        p = found.config.parallel
        first.setdefault((p.tensor, p.context, p.pipeline, p.data, p.expert), found)
    return list(first.values())


def _layouts(config: JobConfig, hardware: Hardware, experts: bool) -> Iterator[ParallelConfig]:
    """Tensor parallelism stays inside a node; ranks that are left over are data-parallel."""
    world = config.parallel.world_size
    virtual, sizes = (1, 2), _powers(min(8, world))
    shared_out = _powers(min(16, world)) if experts else [1]
    for tensor, pipeline, context in product(_powers(min(hardware.gpus, world)), sizes, (1, 2)):
        if world % (tensor * pipeline * context):
            continue
        data = world // (tensor * pipeline * context)
        for chunks, expert, recompute in product(virtual if pipeline > 1 else (1,), shared_out, RECOMPUTE):
            if tensor * context * data % expert == 0:
                yield replace(
                    config.parallel,
                    tensor=tensor,
                    sequence=tensor > 1,
                    pipeline=pipeline,
                    virtual_pipeline=chunks,
                    context=context,
                    data=data,
                    expert=expert,
                    recompute=recompute,
                )


def _budgets(config: JobConfig) -> list[int]:
    return [config.train.token_budget // 2, config.train.token_budget, 2 * config.train.token_budget]


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _largest_pool(job: JobConfig, hardware: Hardware) -> Plan:
    """With the largest fraction for engines that fits; where none does, with the smallest."""
    if job.cold_start_only:
        return plan(job, hardware)
    for fraction in FRACTIONS:
        found = plan(replace(job, engine=replace(job.engine, memory_fraction=fraction)), hardware)
        if found.unfit is None or found.unfit.kind == UPDATE_TOO_LARGE:
            break
    return found


def _dimensions(parallel: ParallelConfig) -> int:
    sizes = (parallel.tensor, parallel.pipeline, parallel.context, parallel.virtual_pipeline, parallel.expert)
    return sum(size > 1 for size in sizes)


def _said(error: ValidationError) -> str:
    """What the config's own check says of a layout."""
    return refused(error.errors()[0]["msg"].removeprefix("Value error, ")).kind
