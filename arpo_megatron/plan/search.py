"""Layout search: the fastest layouts of a job that fit on the same GPUs, and why the others fail."""

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
from arpo_megatron.plan.fit import UPDATE_TOO_LARGE, Plan, conflict, find_conflict, plan

FRACTIONS = (0.85, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Candidates for `engine.memory_fraction`; the largest that fits is used."""

RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
"""Candidates for `parallel.recompute`. `selective` would save little, because FlexAttention stores no scores."""


@dataclass(frozen=True, slots=True)
class LayoutSearchResult:
    """Layouts that fit, the fastest first, and the reasons why others do not."""

    base: JobConfig
    best: tuple[Plan, ...]
    """Plans that fit, fastest first, each with a different partition of the model."""
    tried: int
    fit: int
    failed: tuple[tuple[str, int], ...]
    """Reasons of the other layouts with their counts, most frequent first."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values for `arpo plan --json`."""
        return {
            "best": [plan.to_dict() for plan in self.best],
            "tried": self.tried,
            "fit": self.fit,
            "failed": dict(self.failed),
        }


def search(config: JobConfig, hardware: Hardware, *, best: int = 5) -> LayoutSearchResult:
    """Try tensor, (virtual) pipeline, context and expert parallelism, pack sizes, recomputation and engine sizes.

    The number of trainer ranks and of engine GPUs is constant. Ranks without another dimension are data-parallel.
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
                failed["engine GPUs are not a multiple of engine.tensor"] += 1
                continue
            try:
                job = replace(
                    config,
                    parallel=parallel,
                    train=replace(config.train, token_budget=budget),
                    engine=replace(config.engine, tensor=tensor, replicas=engines // tensor),
                )
            except ValidationError as error:
                failed[_kind_of(error)] += 1
                continue
            if unfit := find_conflict(job, spec, hardware):
                failed[unfit.kind] += 1
                continue
            candidate = _largest_pool(job, hardware)
            if candidate.unfit is None:
                fitting.append(candidate)
            else:
                failed[candidate.unfit.kind] += 1
    # Prefer fewer dimensions among equal times, which are rounded because they are estimates.
    fitting.sort(key=lambda found: (round(found.seconds, 1), _dimensions(found.config.parallel), found.peak_bytes))
    return LayoutSearchResult(
        config, tuple(_distinct(fitting)[:best]), tried, len(fitting), tuple(failed.most_common())
    )


def _distinct(fitting: list[Plan]) -> list[Plan]:
    """Return the first plan of each partition of model and trees, whatever its packs, recomputation and engines."""
    first: dict[tuple[int, ...], Plan] = {}
    for found in fitting:
        p = found.config.parallel
        first.setdefault((p.tensor, p.context, p.pipeline, p.data, p.expert), found)
    return list(first.values())


def _layouts(config: JobConfig, hardware: Hardware, experts: bool) -> Iterator[ParallelConfig]:
    """Yield layouts with tensor parallelism inside a node. Ranks without another dimension are data-parallel."""
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
    """Plan with the largest engine memory fraction that fits, or the smallest if none does."""
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


def _kind_of(error: ValidationError) -> str:
    """Return the kind of an error of the config's validation."""
    return conflict(error.errors()[0]["msg"].removeprefix("Value error, ")).kind
