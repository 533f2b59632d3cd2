"""A job on another number of nodes: the recipe's own layout for them, or more or fewer ranks and engines."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.resolve import Source, explicit_keys, layers, resolve, variant_names, with_overrides
from arpo_megatron.plan.memory import shared
from arpo_megatron.plan.node_layout import lay_out_nodes


def on_nodes(
    recipe: str, nodes: int | None, gpus_per_node: int, *, file: Path | None = None, overrides: Sequence[str] = ()
) -> JobConfig:
    """A recipe on so many nodes: in its own layout for them, else in the one it has with more or fewer ranks.

    The recipe's own is taken where its placement is the job's and no variant that was asked for is a layout too. What
    the user has said of a job is never changed; `lay_out_nodes` says where that and the nodes do not agree.

    Raises:
        UserError: as `resolve.resolve`, or the layout cannot fill the nodes.
    """
    job = resolve(recipe, file=file, overrides=overrides)
    if nodes is None:
        return job
    asked = layers(recipe, file=file, overrides=overrides)
    chosen = {key for layer in asked if layer.source is Source.VARIANT for key in layer.keys}
    own = f"{nodes}node{'s' if nodes > 1 else ''}"
    if "parallel.data" not in chosen and own in variant_names(recipe.split("+", maxsplit=1)[0]):
        laid = f"{recipe}+{own}"
        if resolve(laid).engine.placement == job.engine.placement:
            job = resolve(laid, file=file, overrides=overrides)
    said = explicit_keys([layer for layer in asked if layer.source is not Source.VARIANT])
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
        now = parallel.world_size + engine.tensor * engine.replicas
        ranks = max(1, parallel.world_size * gpus // (now * unit)) * unit
        engines = gpus - ranks
    block = parallel.tensor * parallel.pipeline * parallel.context
    replicas = engine.replicas if config.sft_only else engines // engine.tensor
    if ranks % block or not replicas or (engines % engine.tensor and not config.sft_only):
        raise UserError(
            f"{nodes} node(s) with {gpus_per_node} GPUs cannot be divided into tensor {parallel.tensor} x context "
            f"{parallel.context} x pipeline {parallel.pipeline} and engines of {engine.tensor}: give parallel.data and "
            "engine.replicas too"
        )
    return with_overrides(config, [f"parallel.data={ranks // block}", f"engine.replicas={replicas}"])


def _takes(config: JobConfig, nodes: int, gpus_per_node: int) -> bool:
    try:
        lay_out_nodes(replace(config, platform="auto"), gpus_per_node, nodes)
    except UserError:
        return False
    return True
