"""`arpo bench ...`: measurements, side by side in one run. The last line of standard output is one JSON object."""

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from arpo_megatron.cli.bench_gpu import app as gpu
from arpo_megatron.hardware.environment import CPU_ENVIRONMENT
from arpo_megatron.jobs import resolve

app = typer.Typer(no_args_is_help=True, help="Measure, side by side in one run; the last line is one JSON object.")

app.add_typer(gpu, name="gpu")


class MixName(StrEnum):
    """Families of trees (plan/synthetic_trees.py)."""

    REASONING = "reasoning"
    DEEP_SEARCH = "deep_search"
    LONG_PROMPT = "long_prompt"
    TAU2_LIKE = "tau2_like"


@app.command()
def pack(
    mix: Annotated[
        list[MixName] | None, typer.Option(help="Families of trees; all of them where none is named.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed updates of each side, in turn.")] = 3,
    json_only: Annotated[bool, typer.Option("--json", help="No progress on standard error.")] = False,
) -> None:
    """A training step on trees against the same trajectories flattened."""
    os.environ.update(CPU_ENVIRONMENT)
    from arpo_megatron.actor.parallel import quiet

    quiet()
    from arpo_megatron.bench.pack import bench_pack

    names = [m.value for m in (mix or MixName)]
    _answer("pack", bench_pack(resolve.resolve("quickstart"), mixes=names, repeats=repeats, progress=not json_only))


@app.command()
def rollout(
    controller: Annotated[
        bool,
        typer.Option(help="Also the controller alone, to 32,768 trajectories, engine and tools simulated."),
    ] = True,
    json_only: Annotated[bool, typer.Option("--json", help="No progress on standard error.")] = False,
) -> None:
    """Growing trees without waiting against a batch-synchronous loop, on one engine with slow tools."""
    os.environ.update(CPU_ENVIRONMENT)
    from arpo_megatron.bench.rollout import bench_rollout

    _answer("rollout", bench_rollout(controller=controller, progress=not json_only))


@app.command()
def load(
    gigabytes: Annotated[float, typer.Option(min=0.1, help="Weights of the random model, in 10^9 bytes.")] = 1.0,
    tensor: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 2,
    pipeline: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    directory: Annotated[
        Path | None, typer.Option(help="Where to write twice the weights; default: the temporary directory.")
    ] = None,
) -> None:
    """Memory of loading and exporting a model: at most the own shard and the two largest tensors on every rank."""
    os.environ.update(CPU_ENVIRONMENT)
    from arpo_megatron.bench.load import bench_load

    _answer("load", bench_load(gigabytes, tensor, pipeline, directory))


@app.command()
def sync(
    megabytes: Annotated[int, typer.Option(min=1, help="Weights of the random model, in 10^6 bytes.")] = 600,
    tensor: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of the trainer.")] = 1,
    bucket_mb: Annotated[int, typer.Option(min=1, help="sync.bucket_mb")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 5,
    directory: Annotated[
        Path | None, typer.Option(help="Where to write the model and two copies; default: the temporary directory.")
    ] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Nothing but the result.")] = False,
) -> None:
    """Whole weight pushes into a running engine against the bare transfer of the same bytes, for each transport."""
    os.environ.update(CPU_ENVIRONMENT)
    from arpo_megatron.bench.sync import bench_sync

    if not json_only:
        print(f"a model of {megabytes} MB and {repeats + 1} rounds of pushes: a minute or two", file=sys.stderr)
    _answer("sync", bench_sync(megabytes, tensor, bucket_mb, repeats, directory))


@app.command()
def sandbox(
    cold_calls: Annotated[int, typer.Option(min=2, help="Cold starts; the service gets 20 calls for each.")] = 20,
    in_flight: Annotated[int, typer.Option(min=1, help="Calls at a time where throughput is measured.")] = 8,
    passages: Annotated[int, typer.Option(min=1, help="Passages of the corpus that is searched.")] = 100_000,
    json_only: Annotated[bool, typer.Option("--json", help="Nothing but the result.")] = False,
) -> None:
    """The tool service: an isolated python call against a cold interpreter with the same imports; search and cache."""
    from tools_sandbox.bench.python import bench_python
    from tools_sandbox.bench.search import bench_search

    if not json_only:
        print(f"{cold_calls * 3} cold starts, {cold_calls * 60} calls, an index: a minute", file=sys.stderr)
    python = bench_python(cold_calls, in_flight)
    ratios = {name: python[name] for name in ("latency_ratio", "throughput_ratio")}
    _answer("sandbox", {**ratios, "python": python, "search": bench_search(passages)})


def _answer(name: str, figures: dict[str, Any]) -> None:
    print(json.dumps({"benchmark": name, **figures}), flush=True)
