"""Layout search: the fastest layouts of a job that fit on the same GPUs, and why the others fail."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

from pydantic import ValidationError

from arpo_megatron.config import JobConfig, ParallelConfig, RolloutConfig
from arpo_megatron.hardware.placement import gpus_for_both
from arpo_megatron.hardware.specs import Hardware
from arpo_megatron.models.known import load_spec
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.plan.activations import without_recompute
from arpo_megatron.plan.fit import (
    TOGETHER_TOO_LARGE,
    UPDATE_TOO_LARGE,
    JobEstimate,
    Unfit,
    Workloads,
    conflict,
    find_conflict,
    plan,
)
from arpo_megatron.plan.memory import colocated, job_memory
from arpo_megatron.plan.recompute import recomputations
from arpo_megatron.plan.timing import push_seconds
from arpo_megatron.plan.workload import trees_of_update
from tools_sandbox.utils.faults import fault_text

FRACTIONS = (0.85, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Candidates for `engine.memory_fraction`; the largest that fits is used."""
BUDGETS = (8192, 16384, 32768)
"""Candidates for `train.token_budget`, next to the job's own."""
TOLERANCE = 1.15
"""Ratio of times below which a simpler layout is preferred: the estimates are not better than that, and data-parallel
ranks are the ones that another number of nodes can change."""
SAME = 1.01
"""Ratio of times below which smaller packs are preferred: their attention kernels have fewer lengths to compile."""
MARGIN = 0.05
"""Share of a GPU's memory that a found layout leaves free, because no GPU has been measured."""

Where = Literal["colocated", "split"]


@dataclass(frozen=True, slots=True)
class LayoutSearchResult:
    """Layouts that fit, and the reasons why others do not."""

    base: JobConfig
    best: tuple[JobEstimate, ...]
    """Plans that fit, each with a different partition of the model and another placement. The first one is the
    simplest of those that are about as fast as the fastest; the others follow by time."""
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


def search(
    config: JobConfig, hardware: Hardware, *, best: int = 5, placements: Sequence[Where] = ("colocated", "split")
) -> LayoutSearchResult:
    """Try placements, transports, parallelism, sizes of packs and groups, recomputation, offload and engine sizes.

    The number of GPUs is constant. Engines share those of the trainer, or have whole nodes (on one node: GPUs) of their
    own, and then trees are sampled while the trainer trains on those of the step before (`rollout.max_staleness=1`).
    Ranks without another dimension are data-parallel.
    """
    planner = _Planner(hardware, load_spec(config.model), Workloads.of(config))
    fitting: list[JobEstimate] = []
    failed: Counter[str] = Counter()
    bound = planner.workloads.largest.bound
    for job in _candidates(config, hardware, planner.spec.experts is not None, bound, placements):
        found = job if isinstance(job, Unfit) else planner.attempt(job)
        if isinstance(found, Unfit):
            failed[found.kind] += 1
        else:
            fitting.append(found)
    return LayoutSearchResult(
        base=config,
        best=tuple(_distinct(_simplest_first(fitting), best)),
        tried=failed.total() + len(fitting),
        fit=len(fitting),
        failed=tuple(failed.most_common()),
    )


def _simplest_first(fitting: Sequence[JobEstimate]) -> list[JobEstimate]:
    """Return the simplest of the plans that are about as fast as the fastest, then all plans by time."""
    by_time = sorted(fitting, key=_rank)
    near = [found for found in by_time if found.seconds <= TOLERANCE * by_time[0].seconds]
    if not near:
        return []
    simplest = min(map(_complexity, near))
    alike = [found for found in near if _complexity(found) == simplest]
    same = [found for found in alike if found.seconds <= SAME * alike[0].seconds]
    return [min(same, key=lambda found: found.config.train.token_budget), *by_time]


def _distinct(fitting: Sequence[JobEstimate], best: int) -> list[JobEstimate]:
    """Return the first plans of each partition of the model, and of several placements not more than 3/5 of one."""
    first: dict[tuple[object, ...], JobEstimate] = {}
    for found in fitting:
        first.setdefault(_partition(found.config), found)
    several = len({colocated(found.config) for found in fitting}) > 1
    limit, kept = math.ceil(0.6 * best) if several else best, Counter[bool]()
    chosen: list[JobEstimate] = []
    for found in first.values():
        if kept[colocated(found.config)] < limit and len(chosen) < best:
            kept[colocated(found.config)] += 1
            chosen.append(found)
    return chosen


@dataclass(frozen=True, slots=True)
class _Planner:
    """Tries layouts of one job on given hardware and workloads."""

    hardware: Hardware
    spec: ModelSpec
    workloads: Workloads
    chosen: dict[tuple[object, ...], ParallelConfig | None] = field(default_factory=dict)
    """Layouts with the recomputation that fits, by what decides it; None if none fits."""

    def attempt(self, job: JobConfig) -> JobEstimate | Unfit:
        """Return the plan of a layout with the largest engines that fit and the fastest transport, or why none fits.

        It recomputes no more than it must. The optimizer's state goes to host memory only if it does not fit otherwise.
        """
        if unfit := find_conflict(job, self.spec, self.hardware):
            return unfit
        files = replace(job, sync=replace(job.sync, transport="disk"))
        if job.engine.quantization == "none" and self._push_s(files) < self._push_s(job):
            job = files
        if job.parallel.data > trees_of_update(job):
            return conflict("data-parallel ranks would have no trees")
        found = self._with_least_recompute(job)
        too_large = isinstance(found, Unfit) and found.kind in (UPDATE_TOO_LARGE, TOGETHER_TOO_LARGE)
        if too_large and _can_offload(job):
            found = self._with_least_recompute(replace(job, optimizer=replace(job.optimizer, offload=True)))
        return found

    def _with_least_recompute(self, job: JobConfig) -> JobEstimate | Unfit:
        """Return the plan that recomputes no more than it must."""
        # The memory of an update does not depend on the engines' size.
        key = job.parallel, job.train.token_budget, job.train.group_tokens, job.optimizer.offload, colocated(job)
        if key not in self.chosen:
            self.chosen[key] = self._least_recompute(job)
        parallel = self.chosen[key]
        return _TOO_LARGE if parallel is None else self._with_largest_pool(replace(job, parallel=parallel))

    def _least_recompute(self, job: JobConfig) -> ParallelConfig | None:
        def fits(parallel: ParallelConfig) -> bool:
            needs = job_memory(replace(job, parallel=parallel), self.spec, self.hardware, self.workloads.largest)
            return sum(needs.training.values()) <= (1 - MARGIN) * self.hardware.memory

        def seconds(parallel: ParallelConfig) -> float:
            return self._plan(replace(job, parallel=parallel)).seconds_by_phase["update"]

        found = list(recomputations(job.parallel, self.spec, fits))
        return found[0] if len(found) == 1 else min(found, key=seconds, default=None)

    def _push_s(self, job: JobConfig) -> float:
        return 0.0 if job.sft_only else push_seconds(job, self.spec, self.hardware)

    def _with_largest_pool(self, job: JobConfig) -> JobEstimate | Unfit:
        limit = (1 - MARGIN) * self.hardware.memory
        largest = 1.0
        for fraction in FRACTIONS:
            if fraction > largest:
                continue
            tried = job if job.sft_only else replace(job, engine=replace(job.engine, memory_fraction=fraction))
            found = self._plan(tried)
            training = sum(found.memory.training.values())
            if training > limit or job.sft_only:
                break
            if found.unfit is None and found.peak_bytes <= limit:
                return found
            largest = fraction - (found.peak_bytes - limit) / self.hardware.memory
        if found.unfit is None and training <= limit:
            return found
        return _TOO_LARGE if training > limit else found.unfit or _TOGETHER

    def _plan(self, job: JobConfig) -> JobEstimate:
        return plan(job, self.hardware, workloads=self.workloads)


_TOO_LARGE = Unfit(UPDATE_TOO_LARGE, UPDATE_TOO_LARGE)
_TOGETHER = Unfit(TOGETHER_TOO_LARGE, TOGETHER_TOO_LARGE)


def _can_offload(job: JobConfig) -> bool:
    whole = job.parallel.distributed_optimizer and job.model.dtype == "bfloat16"
    return whole and not job.sft_only and not job.optimizer.offload


def _rank(found: JobEstimate) -> tuple[float, int, float, float]:
    """Return the sort key. Times are estimates, so they have three digits; among equal ones the simplest is first."""
    busy = sum(found.seconds_by_phase.values())  # with split placement, what waits for the slower side counts, too
    return _three_digits(found.seconds), _dimensions(found.config), _three_digits(busy), found.peak_bytes


def _three_digits(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def _complexity(found: JobEstimate) -> tuple[int, float]:
    parallel = found.config.parallel
    return _dimensions(found.config), parallel.world_size / parallel.data


def _dimensions(config: JobConfig) -> int:
    p = config.parallel
    sizes = (p.tensor, p.pipeline, p.context, p.virtual_pipeline, p.expert)
    return sum(size > 1 for size in sizes) + (p.pipeline > 1) + 2 * config.optimizer.offload


def _partition(config: JobConfig) -> tuple[object, ...]:
    """Return the partition of model and GPUs, whatever its packs, recomputation and engines."""
    p = config.parallel
    return p.tensor, p.context, p.pipeline, p.data, p.expert, colocated(config)


def _candidates(
    config: JobConfig, hardware: Hardware, experts: bool, bound: int, placements: Sequence[Where]
) -> Iterator[JobConfig | Unfit]:
    """Yield layouts with the same number of GPUs, and an Unfit for each that the config's validation refuses."""
    for where, rollout, ranks, engine_gpus in _placed(config, hardware, placements):
        sizes = [config.engine.tensor] if config.sft_only else _powers(min(hardware.gpus, engine_gpus))
        budgets = sorted({*BUDGETS, config.train.token_budget})
        packed = (
            (parallel, budget, group)
            for parallel, budget in product(_layouts(config, ranks, hardware, experts), budgets)
            for group in group_sizes(parallel, budget, bound, config.train.group_tokens)
        )
        for (parallel, budget, group), tensor in product(packed, sizes):
            if engine_gpus % tensor:
                yield conflict("engine GPUs are not a multiple of engine.tensor")
                continue
            if not parallel.nested_packs and budget < config.model.max_length:
                yield conflict("train.token_budget does not hold a whole trajectory")
                continue
            replicas = config.engine.replicas if config.sft_only else engine_gpus // tensor
            try:
                yield replace(
                    config,
                    parallel=parallel,
                    train=replace(config.train, token_budget=budget, group_tokens=group),
                    engine=replace(config.engine, placement=where, tensor=tensor, replicas=replicas),
                    rollout=rollout,
                    optimizer=replace(config.optimizer, offload=config.sft_only and config.optimizer.offload),
                )
            except ValidationError as error:
                yield conflict(fault_text(error.errors()[0]))


def group_sizes(parallel: ParallelConfig, budget: int, bound: int, own: int | None) -> list[int | None]:
    """Return candidates for `train.group_tokens`, ascending; None for whole trees.

    Args:
        parallel: layout.
        budget: tokens of a pack, which a group must hold.
        bound: tokens of the largest possible tree.
        own: the job's `train.group_tokens`.
    """
    if parallel.nested_packs:
        return [None]
    sizes = {budget, 2 * budget, 4 * budget} if own is None else {budget, 2 * budget, 4 * budget, own}
    return [*sorted(size for size in sizes if budget <= size < bound), None]


def _placed(
    config: JobConfig, hardware: Hardware, placements: Sequence[Where]
) -> Iterator[tuple[Literal["auto", "colocated", "split"], RolloutConfig, int, int]]:
    """Yield each placement: its name, its rollouts, the number of trainer ranks, and that of the engines' GPUs."""
    rollout = config.rollout
    if config.sft_only:
        yield config.engine.placement, rollout, config.parallel.world_size, 0
        return
    total = config.parallel.world_size if colocated(config) else gpus_for_both(config)
    if "colocated" in placements:
        # Without trees in flight, nothing is stale and nothing continues over a push.
        yield "colocated", replace(rollout, max_staleness=0, stale="wait", across_push="keep"), total, total
    if "split" in placements and total > 1:
        unit = hardware.gpus if total > hardware.gpus else 1
        if not rollout.oversampling:
            rollout = replace(rollout, max_staleness=max(1, rollout.max_staleness))
        count = total // unit
        for share in sorted({*_powers(count - 1), *(count - power for power in _powers(count - 1))}):
            yield "split", rollout, share * unit, total - share * unit


def _layouts(config: JobConfig, world: int, hardware: Hardware, experts: bool) -> Iterator[ParallelConfig]:
    """Yield layouts of `world` ranks with tensor parallelism inside a node."""
    virtual, sizes = (1, 2), _powers(min(8, world))
    shared_out = _powers(min(16, world)) if experts else [1]
    for tensor, pipeline, context in product(_powers(min(hardware.gpus, world)), sizes, (1, 2)):
        if world % (tensor * pipeline * context):
            continue
        data = world // (tensor * pipeline * context)
        for chunks, expert in product(virtual if pipeline > 1 else (1,), shared_out):
            if tensor * context * data % expert == 0:
                yield replace(
                    without_recompute(config.parallel),
                    tensor=tensor,
                    sequence=tensor > 1,
                    pipeline=pipeline,
                    virtual_pipeline=chunks,
                    context=context,
                    data=data,
                    expert=expert,
                )


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]
