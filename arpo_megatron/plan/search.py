"""Layouts of the same job on the same GPUs: the fastest that fit, and why the others do not."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from arpo_megatron.actor.flops import Recompute
from arpo_megatron.config import JobConfig, ParallelConfig
from arpo_megatron.errors import UserError
from arpo_megatron.plan.fit import Plan, impossible, plan
from arpo_megatron.plan.hardware import Hardware
from arpo_megatron.plan.memory import shared
from arpo_megatron.resolve import nodes_variant, resolve, variant_names
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


def search(config: JobConfig, hardware: Hardware, *, best: int = 5) -> Found:
    """Tries tensor, pipeline, virtual pipeline, context and expert parallelism, packs, recomputation and engine sizes.

    The number of trainer ranks and of engine GPUs stays; ranks that are left over are data-parallel.
    """
    shape = shape_of(config.model)
    engines = config.engine.tensor * config.engine.replicas
    fitting: list[Plan] = []
    failed: Counter[str] = Counter()
    tried = 0
    for parallel, budget in product(_layouts(config, hardware, shape.experts is not None), _budgets(config)):
        for tensor in _powers(min(hardware.gpus, engines)):
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
            except ValueError as error:
                failed[_kind(str(error).partition("Value error, ")[2])] += 1
                continue
            if reason := impossible(job, shape, hardware):
                failed[_kind(reason)] += 1
                continue
            candidate = _largest_pool(job, hardware)
            if candidate.reason is None:
                fitting.append(candidate)
            else:
                failed[_kind(candidate.reason)] += 1
    # Among equals the layout with fewer dimensions; rounded, because the times are estimates.
    fitting.sort(key=lambda found: (round(found.seconds, 1), _dimensions(found.config.parallel), found.peak_bytes))
    return Found(config, tuple(_unlike(fitting)[:best]), tried, len(fitting), tuple(failed.most_common()))


def on_nodes(
    recipe: str, nodes: int | None, hardware: Hardware, *, file: Path | None = None, words: Sequence[str] = ()
) -> JobConfig:
    """A recipe on so many nodes: in its own layout for them, else with as many data-parallel ranks as they hold.

    Raises:
        UserError: as `resolve.resolve`, or the layout cannot fill the nodes.
    """
    if nodes is None:
        return resolve(recipe, file=file, words=words)
    if (variant := nodes_variant(nodes)) in variant_names(recipe.split("+", maxsplit=1)[0]):
        return resolve(f"{recipe}+{variant}", file=file, words=words)
    return scaled(resolve(recipe, file=file, words=words), nodes, hardware.gpus)


def scaled(config: JobConfig, nodes: int, gpus_per_node: int) -> JobConfig:
    """The job on so many nodes, with more or fewer data-parallel ranks and engines.

    Raises:
        UserError: the GPUs are no multiple of what one data-parallel rank or one engine takes.
    """
    gpus = nodes * gpus_per_node
    ranks = gpus if shared(config) else gpus // 2
    parallel, engine = config.parallel, config.engine
    block = parallel.tensor * parallel.pipeline * parallel.context
    engines = ranks if shared(config) else gpus - ranks
    if not ranks or ranks % block or engines % engine.tensor:
        raise UserError(
            f"{nodes} node(s) with {gpus_per_node} GPUs cannot be divided into tensor {parallel.tensor} x context "
            f"{parallel.context} x pipeline {parallel.pipeline} and engines of {engine.tensor}: give parallel.* too"
        )
    return replace(
        config,
        parallel=replace(parallel, data=ranks // block),
        engine=replace(engine, replicas=engines // engine.tensor),
    )


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
    """With the largest fraction that fits; where none does, with the smallest."""
    found = plan(job, hardware)
    for fraction in FRACTIONS:
        found = plan(replace(job, engine=replace(job.engine, memory_fraction=fraction)), hardware)
        if found.fits or (found.reason or "").startswith("training"):
            break
    return found


def _dimensions(parallel: ParallelConfig) -> int:
    sizes = (parallel.tensor, parallel.pipeline, parallel.context, parallel.virtual_pipeline, parallel.expert)
    return sum(size > 1 for size in sizes)


def _kind(reason: str) -> str:
    """A reason without the figures in which layouts differ."""
    for start, kind in (
        ("training needs", "an update needs more memory than a GPU has"),
        ("rollout needs", "trainer and engine together need more memory than a GPU has"),
        ("engine needs", "an engine needs more memory than a GPU has"),
        ("an engine's KV pool", "the KV pool cannot hold one trajectory"),
        ("trainer ranks need", "the ranks need more host memory than a node has"),
        ("train.token_budget", "packs of a pipeline or of divided experts must hold a whole trajectory"),
    ):
        if reason.startswith(start):
            return kind
    return reason.split(":", maxsplit=1)[0].split(", but", maxsplit=1)[0].split("[", maxsplit=1)[0].strip()
