"""Layouts of the same job on the same GPUs: the fastest that fit, and why the others do not."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pydantic import ValidationError

from arpo_megatron.config import JobConfig, ParallelConfig
from arpo_megatron.hardware.specs import Hardware
from arpo_megatron.models.known import load_spec
from arpo_megatron.packing.flops import Recompute
from arpo_megatron.plan.fit import UPDATE_TOO_LARGE, Plan, impossible, plan, refused

FRACTIONS = (0.85, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Of a GPU's memory for an engine; the largest that fits is taken."""

RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
"""`selective` would save little: FlexAttention keeps no scores."""


@dataclass(frozen=True, slots=True)
class LayoutSearchResult:
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


def search(config: JobConfig, hardware: Hardware, *, best: int = 5) -> LayoutSearchResult:
    """Tries tensor, pipeline, virtual pipeline, context and expert parallelism, packs, recomputation and engine sizes.

    The number of trainer ranks and of engine GPUs stays; ranks that are left over are data-parallel.
    """
    spec = load_spec(config.model)
    engines = config.engine.tensor * config.engine.replicas
    sizes = [config.engine.tensor] if config.sft_only else _powers(min(hardware.gpus, engines))
    fitting: list[Plan] = []
    failed: Counter[str] = Counter()
    tried = 0
    for parallel, budget in product(_layouts(config, hardware, spec.experts is not None), _budgets(config)):
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
            if unfit := impossible(job, spec, hardware):
                failed[unfit.kind] += 1
                continue
            candidate = _largest_pool(job, hardware)
            if candidate.unfit is None:
                fitting.append(candidate)
            else:
                failed[candidate.unfit.kind] += 1
    # Among equals the layout with fewer dimensions; rounded, because the times are estimates.
    fitting.sort(key=lambda found: (round(found.seconds, 1), _dimensions(found.config.parallel), found.peak_bytes))
    return LayoutSearchResult(config, tuple(_unlike(fitting)[:best]), tried, len(fitting), tuple(failed.most_common()))


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
    if job.sft_only:
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
