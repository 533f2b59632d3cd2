"""Find the recomputation with which a layout fits: none if that fits, else modules, or as few whole layers as fit."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from arpo_megatron.config import ParallelConfig, RecomputedModule
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.plan.activations import without_recompute

CHEAP_OF_EXPERTS: tuple[RecomputedModule, ...] = ("layernorm", "moe_act")
"""Modules of a mixture of experts to compute again. They have no matrix products."""
CHEAP_OF_DENSE: tuple[RecomputedModule, ...] = ("mlp",)
"""Modules of a dense model to compute again. Attention would save little, because it stores no scores."""

Fits = Callable[[ParallelConfig], bool]


def recomputations(parallel: ParallelConfig, spec: ModelSpec, fits: Fits) -> Iterator[ParallelConfig]:
    """Yield the layout without recomputation if it fits; else with modules, and with the fewest layers that fit.

    Args:
        parallel: the layout.
        spec: the model.
        fits: whether a layout fits in memory. With more recomputed layers a layout needs less.
    """
    plain = without_recompute(parallel)
    if fits(plain):
        yield plain
        return
    modules = CHEAP_OF_DENSE if spec.experts is None else CHEAP_OF_EXPERTS
    selective = replace(plain, recompute="selective", recompute_modules=modules)
    if fits(selective):
        yield selective
    full = replace(plain, recompute="full")
    if fits(full):
        yield _fewest_layers(full, spec.layers // (parallel.pipeline * parallel.virtual_pipeline), fits)


def _fewest_layers(full: ParallelConfig, layers: int, fits: Fits) -> ParallelConfig:
    """Return a layout that fits with all `layers` layers of a chunk recomputed, with as few of them as fit."""
    low, high = 1, layers
    while low < high:
        middle = (low + high) // 2
        if fits(replace(full, recompute_layers=middle)):
            high = middle
        else:
            low = middle + 1
    return full if low == layers else replace(full, recompute_layers=low)


def describe(parallel: ParallelConfig) -> str:
    """Return what is computed again: `none`, `mlp`, `all layers`, or `12 layers of each chunk`."""
    if parallel.recompute == "none":
        return "none"
    if parallel.recompute == "selective":
        return ", ".join(parallel.recompute_modules)
    chunk = " of each chunk" if parallel.pipeline > 1 else ""
    return "all layers" if parallel.recompute_layers is None else f"{parallel.recompute_layers} layers{chunk}"
