"""The layouts of the recipes are the best that the layout search finds for their GPUs and their placement."""

from dataclasses import fields, replace

import pytest

from arpo_megatron.config import JobConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.models.known import load_spec
from arpo_megatron.plan import GPUS
from arpo_megatron.plan.fit import Unfit, Workloads
from arpo_megatron.plan.search import _Planner, search
from arpo_megatron.recipes._layouts import Fp8Layout, RecipeLayout

QUICK = ("reasoning_600m+2gpus", "reasoning_3b+1gpu", "sft_7b+2nodes")
QUICK_FP8 = ("reasoning_8b+16nodes", "deepsearch_8b+16nodes", "deepsearch_32b+split")


def layouts() -> list[str]:
    names = []
    for recipe in resolve.recipe_names():
        names += [f"{recipe}+{variant}" for variant in resolve.layout_names(recipe)]
    return names


def layout_of(config: JobConfig, gpu: str) -> RecipeLayout:
    """Return the layout of a config in the form of the recipes, to be pasted there."""
    p, engine = config.parallel, config.engine
    split = engine.placement == "split"
    assert engine.memory_fraction is not None
    return RecipeLayout(
        gpu=gpu,
        tensor=p.tensor,
        data=p.data,
        pipeline=p.pipeline,
        virtual_pipeline=p.virtual_pipeline,
        context=p.context,
        expert=p.expert,
        recompute=p.recompute_modules if p.recompute == "selective" else p.recompute,
        layers=p.recompute_layers,
        token_budget=config.train.token_budget,
        group_tokens=config.train.group_tokens,
        engine=engine.tensor,
        engines=engine.replicas if split else 0,
        memory_fraction=engine.memory_fraction,
        offload=config.optimizer.offload,
        split=split,
    )


def fp8_layout_of(config: JobConfig) -> Fp8Layout:
    """Return the values of a config that `+fp8` sets for each layout."""
    p = config.parallel
    assert config.engine.memory_fraction is not None
    return Fp8Layout(
        recompute=p.recompute_modules if p.recompute == "selective" else p.recompute,
        layers=p.recompute_layers,
        memory_fraction=config.engine.memory_fraction,
    )


def changes(layout: RecipeLayout | Fp8Layout) -> dict[str, object]:
    plain = type(layout)()
    return {
        item.name: getattr(layout, item.name)
        for item in fields(layout)
        if getattr(layout, item.name) != getattr(plain, item.name)
    }


def check(recipe: str) -> None:
    job, gpu = resolve.resolve(recipe), resolve.gpu_of(recipe)
    where = "split" if job.engine.placement == "split" else "colocated"
    found = search(job, GPUS[gpu], best=1, placements=(where,)).best[0]
    assert changes(layout_of(job, gpu)) == changes(layout_of(found.config, gpu))


def check_fp8(recipe: str) -> None:
    job, hardware = resolve.resolve(f"{recipe}+fp8"), GPUS[resolve.gpu_of(recipe)]
    found = _Planner(hardware, load_spec(job.model), Workloads.of(job))._with_least_recompute(job)
    fitted = Fp8Layout() if isinstance(found, Unfit) else fp8_layout_of(found.config)
    assert changes(fp8_layout_of(job)) == changes(fitted)


@pytest.mark.parametrize("recipe", QUICK)
def test_layout_of_a_recipe_is_the_best_one(recipe: str) -> None:
    check(recipe)


@pytest.mark.slow_campaign
@pytest.mark.parametrize("recipe", layouts())
def test_every_layout_of_a_recipe_is_the_best_one(recipe: str) -> None:
    check(recipe)


@pytest.mark.parametrize("recipe", QUICK_FP8)
def test_layout_recomputes_no_more_with_fp8_than_it_must(recipe: str) -> None:
    check_fp8(recipe)


@pytest.mark.slow_campaign
@pytest.mark.parametrize("recipe", layouts())
def test_every_layout_recomputes_no_more_with_fp8_than_it_must(recipe: str) -> None:
    check_fp8(recipe)


def test_search_does_not_depend_on_the_layout_that_it_starts_from() -> None:
    one, other = (
        search(replace(resolve.resolve("reasoning_600m+4gpus"), engine=engine), GPUS["h100-80"], best=1)
        for engine in (
            resolve.resolve("reasoning_600m+4gpus").engine,
            replace(resolve.resolve("reasoning_600m+4gpus").engine, tensor=4, replicas=1, memory_fraction=0.3),
        )
    )
    assert one.best[0].config == other.best[0].config
