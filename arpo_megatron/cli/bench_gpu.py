"""`arpo bench gpu ...`: what is measured on a GPU machine. Each command fits into minutes and can be run again."""

import json
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from arpo_megatron.config import JobConfig
from arpo_megatron.jobs import resolve

app = typer.Typer(
    no_args_is_help=True,
    help="For a GPU machine: each command runs what its journal in --out does not have yet; the last line is JSON.",
)
Out = Annotated[Path, typer.Option(help="Directory of journals; an earlier run's is continued.")]
Minutes = Annotated[float, typer.Option(min=0.1, help="No part is started later than this.")]
Dry = Annotated[bool, typer.Option("--dry", help="Import and build everything up to the first use of a GPU.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget what an earlier run has done.")]


@app.command()
def demo(out: Out = Path("gpu"), dry: Dry = False) -> None:
    """The quickstart in bfloat16, trainer and engine on one GPU; after an interruption it goes on."""
    out.mkdir(parents=True, exist_ok=True)
    run = out / "demo"
    config = resolve.resolve("quickstart", overrides=["model.dtype=bfloat16", f"run_dir={run}"])
    print(json.dumps(_dry_demo(config) if dry else _demo(config, resume=run.exists())), flush=True)


@app.command()
def exact(out: Out = Path("gpu"), minutes: Minutes = 7.0, dry: Dry = False, fresh: Fresh = False) -> None:
    """Attention against float64; bfloat16 and FP8 against float32; trees against sequences; trainer against engine."""
    _prepare()
    from arpo_megatron.bench.gpu.exact import Exactness, exact_parts
    from arpo_megatron.bench.gpu.journal import run_parts

    directory = out / "exact"
    directory.mkdir(parents=True, exist_ok=True)
    parts = exact_parts(Exactness(directory))
    print(json.dumps(run_parts("exact", parts, out, minutes=minutes, dry=dry, fresh=fresh)), flush=True)


@app.command()
def update(out: Out = Path("gpu"), minutes: Minutes = 6.5, dry: Dry = False, fresh: Fresh = False) -> None:
    """Training speed at the shape of Qwen3 4B: flat and trees, bfloat16 and FP8, against the measured peak."""
    _prepare()
    from arpo_megatron.bench.gpu.journal import run_parts
    from arpo_megatron.bench.gpu.update import Bench, update_parts

    print(
        json.dumps(run_parts("update", update_parts(Bench()), out, minutes=minutes, dry=dry, fresh=fresh)), flush=True
    )


@app.command()
def rollout(out: Out = Path("gpu"), minutes: Minutes = 6.0, dry: Dry = False, fresh: Fresh = False) -> None:
    """Decoding at the shapes of Qwen3 4B and 8B against memory bandwidth; the cost of entropies; trees of forks."""
    _prepare()
    from arpo_megatron.bench.gpu.journal import run_parts
    from arpo_megatron.bench.gpu.random_engines import RandomEngines
    from arpo_megatron.bench.gpu.rollout import ENGINE, Rollouts, rollout_parts

    with RandomEngines(out, "bfloat16", ENGINE) as engines:
        parts = rollout_parts(Rollouts(engines))
        print(json.dumps(run_parts("rollout", parts, out, minutes=minutes, dry=dry, fresh=fresh)), flush=True)


@app.command()
def push(out: Out = Path("gpu"), minutes: Minutes = 5.5, dry: Dry = False, fresh: Fresh = False) -> None:
    """Weights into an engine on the same GPU, bfloat16 and FP8, against a bare copy; lending the engine's memory."""
    _prepare()
    from arpo_megatron.bench.gpu.journal import run_parts
    from arpo_megatron.bench.gpu.push import ENGINE, Pushes, push_parts
    from arpo_megatron.bench.gpu.random_engines import RandomEngines

    with RandomEngines(out, "bfloat16", ENGINE) as engines, closing(Pushes(engines)) as pushes:
        parts = push_parts(pushes)
        print(json.dumps(run_parts("push", parts, out, minutes=minutes, dry=dry, fresh=fresh)), flush=True)


@app.command()
def step(out: Out = Path("gpu"), minutes: Minutes = 6.0, dry: Dry = False, fresh: Fresh = False) -> None:
    """A whole ARPO job of three steps at the shape of Qwen3 4B: seconds by phase and memory, beside the planner's."""
    _quiet()  # the job gives each of its processes the environment that it needs
    from arpo_megatron.bench.gpu.journal import run_parts
    from arpo_megatron.bench.gpu.step import Step, step_parts

    parts = step_parts(Step(out.resolve() / "step"))
    print(json.dumps(run_parts("step", parts, out, minutes=minutes, dry=dry, fresh=fresh)), flush=True)


@app.command()
def largest(out: Out = Path("gpu"), minutes: Minutes = 4.0, dry: Dry = False, fresh: Fresh = False) -> None:
    """The largest Qwen3 that trains here with FP8 and its optimizer in host memory, beside the planner's claim."""
    _prepare()
    from arpo_megatron.bench.gpu.journal import run_parts
    from arpo_megatron.bench.gpu.largest import Largest, largest_parts

    parts = largest_parts(Largest(out.resolve() / "largest"))
    print(json.dumps(run_parts("largest", parts, out, minutes=minutes, dry=dry, fresh=fresh)), flush=True)


@app.command()
def profile(out: Out = Path("gpu"), minutes: Minutes = 6.0, dry: Dry = False, fresh: Fresh = False) -> None:
    """Kernels of a training step of `update` with the most time, and the device's pauses; traces stay in --out."""
    _prepare()
    from arpo_megatron.bench.gpu.journal import run_parts
    from arpo_megatron.bench.gpu.profile import profile_parts
    from arpo_megatron.bench.gpu.update import Bench

    parts = profile_parts(Bench(), out / "profile")
    print(json.dumps(run_parts("profile", parts, out, minutes=minutes, dry=dry, fresh=fresh)), flush=True)


def _prepare() -> None:
    import os

    from arpo_megatron.hardware.environment import trainer_environment

    os.environ.update(trainer_environment("auto"))
    _quiet()


def _quiet() -> None:
    from arpo_megatron.actor.parallel import quiet

    quiet()


def _demo(config: JobConfig, *, resume: bool) -> dict[str, Any]:
    from arpo_megatron.launch.demo import run_demo

    return run_demo(config, resume=resume)


def _dry_demo(config: JobConfig) -> dict[str, Any]:
    """What would run, after every check of inputs and every import of the roles."""
    import arpo_megatron.launch.demo
    import arpo_megatron.sft
    import arpo_megatron.train
    from arpo_megatron.engine.launch import engine_options
    from arpo_megatron.hardware.placement import Placement
    from arpo_megatron.jobs.inputs import check_inputs

    check_inputs(config)
    options = engine_options(config.engine, Placement.of(config, 1), config.model.dtype)
    roles = [module.__name__ for module in (arpo_megatron.sft, arpo_megatron.train, arpo_megatron.launch.demo)]
    return {"dry": True, "roles": roles, "engine": options}
