"""The layouts of the recipes are the best that the layout search finds for their GPUs and their placement."""

from dataclasses import fields, replace

import pytest

from arpo_megatron.config import JobConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.plan import GPUS
from arpo_megatron.plan.search import search
from arpo_megatron.recipes._layouts import RecipeLayout

QUICK = ("reasoning_600m+2gpus", "reasoning_3b+1gpu", "sft_7b+2nodes")


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


def changes(layout: RecipeLayout) -> dict[str, object]:
    plain = RecipeLayout()
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


@pytest.mark.parametrize("recipe", QUICK)
def test_layout_of_a_recipe_is_the_best_one(recipe: str) -> None:
    check(recipe)


@pytest.mark.slow_campaign
@pytest.mark.parametrize("recipe", layouts())
def test_every_layout_of_a_recipe_is_the_best_one(recipe: str) -> None:
    check(recipe)


def test_search_does_not_depend_on_the_layout_that_it_starts_from() -> None:
    one, other = (
        search(replace(resolve.resolve("reasoning_600m+4gpus"), engine=engine), GPUS["h100-80"], best=1)
        for engine in (
            resolve.resolve("reasoning_600m+4gpus").engine,
            replace(resolve.resolve("reasoning_600m+4gpus").engine, tensor=4, replicas=1, memory_fraction=0.3),
        )
    )
    assert one.best[0].config == other.best[0].config
