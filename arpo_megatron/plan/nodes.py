"""Adapt a job to a number of nodes: with the recipe's layout for them, or with more or fewer ranks and engines."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.resolve import (
    Source,
    explicit_keys,
    layers,
    resolve,
    split_recipe,
    variant_names,
    with_overrides,
)
from arpo_megatron.plan.memory import colocated
from arpo_megatron.plan.node_layout import lay_out_nodes


def resolve_on_nodes(
    recipe: str, nodes: int | None, gpus_per_node: int, *, file: Path | None = None, overrides: Sequence[str] = ()
) -> JobConfig:
    """Resolve a recipe for a number of nodes.

    The recipe's own layout for that number is used if it has the job's placement and no chosen variant is a layout.
    Otherwise ranks and engines are added or removed. Values that the user set are never changed; if they do not agree
    with the nodes, `lay_out_nodes` raises later.

    Raises:
        UserError: the recipe or an override is invalid, or the layout cannot fill the nodes.
    """
    job = resolve(recipe, file=file, overrides=overrides)
    if nodes is None:
        return job
    given = layers(recipe, file=file, overrides=overrides)
    chosen = {key for layer in given if layer.source is Source.VARIANT for key in layer.keys}
    layout = f"{nodes}node{'s' if nodes > 1 else ''}"
    if "parallel.data" not in chosen and layout in variant_names(split_recipe(recipe)[0]):
        laid_out = f"{recipe}+{layout}"
        if resolve(laid_out).engine.placement == job.engine.placement:
            job = resolve(laid_out, file=file, overrides=overrides)
    explicit = explicit_keys([layer for layer in given if layer.source is not Source.VARIANT])
    return scale_to_nodes(job, nodes, gpus_per_node, keep=explicit)


def scale_to_nodes(config: JobConfig, nodes: int, gpus_per_node: int, keep: Collection[str] = ()) -> JobConfig:
    """Return the job for a number of nodes, unchanged if it already takes that number.

    Otherwise data-parallel ranks and engines fill the nodes. With split placement they keep their ratio, in whole nodes
    if there are several. If `keep` has one of the two numbers, the job is not changed.

    Raises:
        UserError: the GPUs are not a multiple of what one data-parallel rank or one engine needs.
    """
    if {"parallel.data", "engine.replicas"} & set(keep) or _takes(config, nodes, gpus_per_node):
        return config
    parallel, engine, gpus = config.parallel, config.engine, nodes * gpus_per_node
    ranks = engines = gpus
    if not colocated(config):
        unit = 1 if nodes == 1 else gpus_per_node
        now = parallel.world_size + engine.tensor * engine.replicas
        ranks = max(1, parallel.world_size * gpus // (now * unit)) * unit
        engines = gpus - ranks
    block = parallel.tensor * parallel.pipeline * parallel.context
    replicas = engine.replicas if config.sft_only else engines // engine.tensor
    if ranks % block or not replicas or (engines % engine.tensor and not config.sft_only):
        raise UserError(
            f"{nodes} node(s) with {gpus_per_node} GPUs cannot be divided into tensor {parallel.tensor} x context "
            f"{parallel.context} x pipeline {parallel.pipeline} and engines of {engine.tensor}: set parallel.data and "
            "engine.replicas"
        )
    return with_overrides(config, [f"parallel.data={ranks // block}", f"engine.replicas={replicas}"])


def _takes(config: JobConfig, nodes: int, gpus_per_node: int) -> bool:
    try:
        lay_out_nodes(replace(config, platform="auto"), gpus_per_node, nodes)
    except UserError:
        return False
    return True
