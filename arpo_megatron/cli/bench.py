"""`arpo bench`: measurements of both sides of a comparison in one run. The last line of output is a JSON object."""

import json
import os
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from arpo_megatron.cli.bench_gpu import app as gpu
from arpo_megatron.cli.options import DryRun, Overrides, next_after_dry_run, next_command, with_dry_run
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.environment import CPU_ENVIRONMENT
from arpo_megatron.jobs import resolve

app = typer.Typer(
    no_args_is_help=True,
    help="Measure both sides of a comparison in one run. The last line of standard output is a JSON object.",
)

app.add_typer(gpu, name="gpu")


class MixName(StrEnum):
    """A family of synthetic trees (plan/synthetic_trees.py)."""

    REASONING = "reasoning"
    DEEP_SEARCH = "deep_search"
    LONG_PROMPT = "long_prompt"
    TAU2_LIKE = "tau2_like"


@app.command()
@with_dry_run
def pack(
    mix: Annotated[list[MixName] | None, typer.Option(help="Family of trees, may be repeated; default: all.")] = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Time per family; each side is timed at least once, alternating.")
    ] = 10.0,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers of the model.")] = 1,
    token_budget: Annotated[int, typer.Option(min=256, help="Tokens per pack.")] = 2048,
    json_only: Annotated[bool, typer.Option("--json", help="Print no progress on standard error.")] = False,
) -> None:
    """Compare a training step on trees with one on the same trajectories flattened.

    Without options it takes less than 5 minutes on two idle cores, and 4 GB of memory.
    """
    os.environ.update(CPU_ENVIRONMENT)
    from arpo_megatron.actor.parallel import silence_import_warnings

    silence_import_warnings()
    from arpo_megatron.bench.pack import bench_pack

    names = [m.value for m in (mix or MixName)]
    found = bench_pack(
        resolve.resolve("quickstart"),
        mixes=names,
        seconds=seconds,
        layers=layers,
        token_budget=token_budget,
        progress=not json_only,
    )
    _answer("pack", found)


@app.command()
@with_dry_run
def pipeline(
    mix: Annotated[MixName, typer.Option(help="Family of trees.")] = MixName.REASONING,
    trees: Annotated[
        list[int] | None, typer.Option(min=1, help="Trees per batch, may be repeated; default: 1 and 4.")
    ] = None,
    token_budget: Annotated[
        list[int] | None, typer.Option(min=256, help="Tokens per pack, may be repeated; default: 3072 and 8192.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Time per row; each side is timed at least once, alternating.")
    ] = 15.0,
    json_only: Annotated[bool, typer.Option("--json", help="Print no table on standard error.")] = False,
) -> None:
    """Compare groups of whole trees with packs that repeat ancestors in a pipeline of two stages."""
    os.environ.update(CPU_ENVIRONMENT)
    from arpo_megatron.actor.parallel import silence_import_warnings

    silence_import_warnings()
    from arpo_megatron.bench.pipeline import bench_pipeline
    from arpo_megatron.plan.synthetic_trees import MIXES

    results = bench_pipeline(MIXES[mix.value], trees or [1, 4], token_budget or [3072, 8192], seconds=seconds)
    if not json_only:
        for row in results["rows"]:
            figures = [
                f"{side} {row[side]['seconds']:.2f} s ({row[side]['repeated_share']:.0%} repeated)"
                for side in ("whole", "repeating")
            ]
            ratios = f"repeating over whole {row['repeating_over_whole']:.2f}, planned {row['planned']:.2f}"
            print(
                f"trees {row['trees']}, packs of {row['token_budget']}: {', '.join(figures)}: {ratios}", file=sys.stderr
            )
    _answer("pipeline", {"mix": mix.value, **results})


@app.command()
@with_dry_run
def rollout(
    full: Annotated[
        bool,
        typer.Option(
            help="All tool latencies, twice as many steps, and the controller alone with up to 32,768 trajectories."
        ),
    ] = False,
    json_only: Annotated[bool, typer.Option("--json", help="Print no progress on standard error.")] = False,
) -> None:
    """Compare asynchronous rollouts with a batch-synchronous loop and, with little KV memory, with coroutines."""
    os.environ.update(CPU_ENVIRONMENT)
    from arpo_megatron.bench.rollout import bench_rollout

    _answer("rollout", bench_rollout(full=full, progress=not json_only))


@app.command()
@with_dry_run
def controller(
    trees: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of trees, may be repeated; default: 512 and 2,048.")
    ] = None,
    failure_share: Annotated[
        float, typer.Option(min=0.0, max=0.1, help="Share of the requests with each kind of failure.")
    ] = 0.01,
) -> None:
    """Measure the rollout controller with thousands of trees against two stub engines over HTTP, some of which fail."""
    os.environ.update(CPU_ENVIRONMENT)
    from arpo_megatron.bench.controller import bench_controller
    from arpo_megatron.bench.tool_calling_model import write_model

    with tempfile.TemporaryDirectory(prefix="arpo-bench-controller-") as folder:
        write_model(Path(folder))
        results = bench_controller(Path(folder), trees or (), failure_share)
    _answer("controller", results)
    if results["lost"]:
        raise typer.Exit(1)


@app.command()
@with_dry_run
def sync(
    megabytes: Annotated[int, typer.Option(min=227, help="Least size of the random model, in 10^6 bytes.")] = 600,
    tensor: Annotated[int, typer.Option(min=1, help="Number of tensor-parallel ranks of the trainer.")] = 1,
    bucket_mib: Annotated[int, typer.Option(min=1, help="Value of sync.bucket_mib.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Number of timed rounds.")] = 5,
    directory: Annotated[
        Path | None, typer.Option(help="Directory for the model and two copies; default: the temporary directory.")
    ] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print no progress on standard error.")] = False,
) -> None:
    """Compare whole weight pushes into a running engine with a bare copy of the same bytes, for each transport.

    Pushes from four trainer ranks to two engine ranks are compared with bare exchanges of the same plan.
    """
    os.environ.update(CPU_ENVIRONMENT)
    from arpo_megatron.bench.sync import bench_sync

    if not json_only:
        print(
            f"a model of at least {megabytes} MB, {repeats + 1} rounds of pushes: two or three minutes", file=sys.stderr
        )
    _answer("sync", bench_sync(megabytes, tensor, bucket_mib, repeats, directory))


@app.command()
@with_dry_run
def sandbox(
    cold_calls: Annotated[
        int, typer.Option(min=2, help="Number of cold interpreter starts; the service gets 20 times as many calls.")
    ] = 20,
    in_flight: Annotated[int, typer.Option(min=1, help="Concurrent calls when measuring throughput.")] = 8,
    passages: Annotated[int, typer.Option(min=1, help="Number of passages in the searched corpus.")] = 100_000,
    json_only: Annotated[bool, typer.Option("--json", help="Print no progress on standard error.")] = False,
) -> None:
    """Compare isolated Python calls of the tool service with cold interpreters; measure search and cache."""
    from tools_sandbox.bench.python import GOALS, bench_python
    from tools_sandbox.bench.search import bench_search

    if not json_only:
        print(f"{cold_calls * 3} cold starts, {cold_calls * 60} calls, an index: a minute", file=sys.stderr)
    python = bench_python(cold_calls, in_flight)
    ratios = {name: python[name] for name in GOALS}
    if not json_only:
        for name, goal in GOALS.items():
            print(f"{name} {ratios[name]} (goal on a quiet machine: {goal:g})", file=sys.stderr)
    _answer("sandbox", {**ratios, "goals": GOALS, "python": python, "search": bench_search(passages)})


@app.command()
@with_dry_run
def branching(
    trees: Annotated[int, typer.Option(min=1, help="Number of simulated trees per row.")] = 300,
    json_only: Annotated[bool, typer.Option("--json", help="Print no table on standard error.")] = False,
) -> None:
    """Compare executed calls and depth of forks of pooled and reserved fork budgets."""
    from arpo_megatron.bench.branching import bench_branching

    results = bench_branching(trees)
    if not json_only:
        for row in results["rows"]:
            print(f"{row['calls']} calls per path, uncertain {row['uncertain']}", file=sys.stderr)
            for name in ("pooled", "reserved"):
                figures = "  ".join(f"{key} {value:.2f}" for key, value in row[name].items())
                print(f"  {name:10s} {figures}", file=sys.stderr)
    _answer("branching", results)


@app.command()
@with_dry_run
def importance(
    tokens: Annotated[int, typer.Option(min=2, max=14, help="Length of the enumerated trajectories.")] = 10,
    json_only: Annotated[bool, typer.Option("--json", help="Print no table on standard error.")] = False,
) -> None:
    """Compute bias and noise of each sampling correction exactly, on a small problem."""
    from arpo_megatron.bench.importance import bench_importance

    results = bench_importance(tokens)
    if not json_only:
        for row in results["rows"]:
            print(f"KL {row['kl_nats']:g} nats per trajectory", file=sys.stderr)
            for name, found in row.items():
                if isinstance(found, dict):
                    figures = "  ".join(f"{key} {value:.3f}" for key, value in found.items())
                    print(f"  {name:10s} {figures}", file=sys.stderr)
    _answer("importance", results)


@app.command()
@with_dry_run
def invariance(
    width: Annotated[int, typer.Option(min=8, help="Hidden size, a multiple of 4.")] = 128,
    json_only: Annotated[bool, typer.Option("--json", help="Print no table on standard error.")] = False,
) -> None:
    """Compare kernels of the forward pass in calls of different sizes: which ones prevent bit-for-bit agreement."""
    from arpo_megatron.bench.invariance import bench_invariance

    results = bench_invariance(width)
    if not json_only:
        for name, found in results["kernels"].items():
            sizes = ", ".join(map(str, found["rows_differ"])) or "none"
            print(f"{name:36s} {found['largest_difference']:.1e}  calls that differ: {sizes}", file=sys.stderr)
    _answer("invariance", results)


@app.command()
@with_dry_run
def kernels(
    overrides: Overrides = None,
    tokens: Annotated[int, typer.Option(min=2, help="Length of the chain of tokens.")] = 96,
    json_only: Annotated[bool, typer.Option("--json", help="Print no table on standard error.")] = False,
) -> None:
    """Compare each kernel of the trainer with that of SGLang's CPU server, on the same inputs."""
    os.environ.update(CPU_ENVIRONMENT)
    from arpo_megatron.actor.parallel import silence_import_warnings

    silence_import_warnings()
    from arpo_megatron.bench.engine_kernels import bench_engine_kernels

    results = bench_engine_kernels(resolve.resolve("quickstart", overrides=overrides or []), tokens)
    if not json_only:
        for name, found in results["kernels"].items():
            figures = "  ".join(
                f"{way} {own['over_largest_element']:.1e} ({own['share_that_differs']:.0%} differ)"
                for way, own in found.items()
            )
            print(f"{name:34s} {figures}", file=sys.stderr)
    _answer("kernels", results)


@app.command()
def soak(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="Recipe of the job.")] = "quickstart",
    steps: Annotated[int, typer.Option(min=6, help="Number of training steps.")] = 300,
    warm_up: Annotated[
        int | None, typer.Option(min=0, help="Steps that are not judged; default: a third of the steps.")
    ] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print no table on standard error.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Train a job and show whether the memory of each of its processes is flat; the exit code is 1 if one grows."""
    skipped = steps // 3 if warm_up is None else warm_up
    if steps - skipped < 6:
        raise UserError(f"--steps {steps} --warm-up {skipped} leaves fewer than 6 steps to judge: use more steps")
    job = resolve.resolve(recipe, overrides=[*(overrides or ()), f"train.steps={steps}"])
    if dry_run:
        print(f"train {job.name} for {steps} steps and sample the memory of its processes; the first {skipped} warm up")
        next_after_dry_run()
        return
    from arpo_megatron.bench.soak import bench_soak

    results = bench_soak(job, skipped)
    if not json_only:
        for program, row in results["programs"].items():
            figures = "  ".join(f"{key} {value}" for key, value in row.items())
            print(f"{program:40s} {figures}", file=sys.stderr)
    _answer("soak", results)
    if not results["flat"]:
        raise typer.Exit(1)


def _answer(name: str, results: dict[str, Any]) -> None:
    print(json.dumps({"benchmark": name, **results}), flush=True)
    next_command("arpo", "bench", "--help")
