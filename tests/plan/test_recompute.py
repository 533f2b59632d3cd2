"""The planner recomputes nothing if that fits, else what takes the least time, and never more layers than needed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.config import ParallelConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.plan import GPUS, plan
from arpo_megatron.plan.recompute import describe, recomputations
from arpo_megatron.plan.report import overrides_between
from arpo_megatron.plan.search import MARGIN, search

DENSE, MIXTURE = KNOWN_MODELS["Qwen/Qwen3-8B"], KNOWN_MODELS["Qwen/Qwen3-30B-A3B"]
H100 = GPUS["h100-80"]


def described(layout: ParallelConfig, needed: float, *, experts: bool = False) -> list[str]:
    """Return the choices if a layout fits once it recomputes a share `needed` of its layers; modules count as 0.5."""
    spec = MIXTURE if experts else DENSE

    def fits(parallel: ParallelConfig) -> bool:
        return needed <= (0.5 if parallel.recompute == "selective" else parallel.recomputed_share(spec.layers))

    return [describe(found) for found in recomputations(layout, spec, fits)]


def test_as_little_as_fits_is_recomputed() -> None:
    plain, staged = ParallelConfig(), ParallelConfig(pipeline=2, virtual_pipeline=2)
    assert described(replace(plain, recompute="full"), 0.0) == ["none"]
    assert described(plain, 0.4) == ["mlp", "15 layers"]
    assert described(plain, 0.4, experts=True) == ["layernorm, moe_act", "20 layers"]
    assert described(plain, 0.6) == ["22 layers"]
    assert described(staged, 0.6) == ["6 layers of each chunk"]
    assert described(plain, 1.0) == ["all layers"]
    assert described(plain, 1.1) == []


@given(needed=st.integers(1, 36))
def test_number_of_layers_is_the_smallest_that_fits(needed: int) -> None:
    def fits(parallel: ParallelConfig) -> bool:
        return parallel.recompute == "full" and parallel.recomputed_share(36) * 36 >= needed

    (found,) = recomputations(ParallelConfig(), DENSE, fits)
    assert (found.recompute_layers or 36) == needed


@pytest.mark.parametrize("recipe", ["reasoning_7b+1node", "sft_7b"])
def test_found_layouts_need_each_recomputed_layer(recipe: str) -> None:
    found = search(resolve.resolve(recipe), H100)
    limit, checked = (1 - MARGIN) * H100.memory, 0
    for best in found.best:
        layout = best.config.parallel
        assert sum(best.memory.training.values()) <= limit
        if layout.recompute == "none":
            continue
        layers = layout.recompute_layers or DENSE.layers
        less = (
            replace(layout, recompute="none", recompute_layers=None)
            if layout.recompute == "selective" or layers == 1
            else replace(layout, recompute_layers=layers - 1)
        )
        if layout.recompute_layers is not None or layout.recompute == "selective":
            assert sum(plan(replace(best.config, parallel=less), H100).memory.training.values()) > limit
            checked += 1
    assert checked or "sft" in recipe


def test_modules_can_be_pasted_as_overrides() -> None:
    job = resolve.resolve("moe_30b_a3b+1node")
    layout = replace(
        job.parallel, recompute="selective", recompute_layers=None, recompute_modules=("layernorm", "moe_act")
    )
    text = overrides_between(plan(replace(job, parallel=layout), H100), job)
    assert resolve.resolve("moe_30b_a3b+1node", overrides=text.split()).parallel == layout


def test_layers_without_full_recomputation_are_refused_with_the_key_that_fixes_it() -> None:
    overrides = ["parallel.recompute=none", "parallel.recompute_layers=3"]
    with pytest.raises(UserError, match=r"needs parallel\.recompute=full, not none: give parallel\.recompute_layers="):
        resolve.resolve("deepsearch_14b", overrides=overrides)
    assert resolve.resolve("deepsearch_14b", overrides=[overrides[0], "parallel.recompute_layers=null"])
