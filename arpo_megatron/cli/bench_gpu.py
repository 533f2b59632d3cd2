"""`arpo bench gpu ...`: measurements for a machine with a GPU, each a few minutes long."""

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arpo_megatron.cli.options import next_command, with_dry_run

if TYPE_CHECKING:
    from arpo_megatron.bench.gpu.measure import Measurements

app = typer.Typer(
    no_args_is_help=True,
    help="Measure on a GPU: results go to standard error as they arrive; the last line of standard output is JSON.",
)
Out = Annotated[Path, typer.Option(help="Directory of models, logs and runs.")]


@app.command()
@with_dry_run
def exact(out: Out = Path("gpu")) -> None:
    """Numerical differences: bfloat16 and FP8 against float32, trees against sequences, trainer against engine."""
    _prepare()
    from arpo_megatron.bench.gpu.exact import ExactBench, exact_measurements

    directory = out / "exact"
    directory.mkdir(parents=True, exist_ok=True)
    _run("exact", exact_measurements(ExactBench(directory)))


@app.command()
@with_dry_run
def kernels() -> None:
    """Attention kernels: errors against float64, and speed against flash attention."""
    _prepare()
    from arpo_megatron.bench.gpu.kernels import kernel_measurements

    _run("kernels", kernel_measurements())


@app.command()
@with_dry_run
def update() -> None:
    """Training speed at the size of Qwen3 4B: flat and trees, bfloat16 and FP8, against the measured peak."""
    _prepare()
    from arpo_megatron.bench.gpu.update import UpdateBench, update_measurements

    _run("update", update_measurements(UpdateBench()))


@app.command()
@with_dry_run
def rollout(out: Out = Path("gpu")) -> None:
    """Decoding at the sizes of Qwen3 4B and 8B against memory bandwidth; the cost of entropies; growing trees."""
    _prepare()
    from arpo_megatron.bench.gpu.random_engines import RandomEngines
    from arpo_megatron.bench.gpu.rollout import ENGINE, RolloutBench, rollout_measurements

    with RandomEngines(out, "bfloat16", ENGINE) as engines:
        _run("rollout", rollout_measurements(RolloutBench(engines)))


@app.command()
@with_dry_run
def push(out: Out = Path("gpu")) -> None:
    """Weights into an engine on the same GPU, bfloat16 and FP8, against a bare copy; lending the engine's memory."""
    _prepare()
    from arpo_megatron.bench.gpu.push import ENGINE, PushBench, push_measurements
    from arpo_megatron.bench.gpu.random_engines import RandomEngines

    with RandomEngines(out, "bfloat16", ENGINE) as engines, closing(PushBench(engines)) as bench:
        _run("push", push_measurements(bench))


@app.command()
@with_dry_run
def step(out: Out = Path("gpu")) -> None:
    """A whole ARPO job of three steps at the size of Qwen3 4B: seconds and device memory by phase."""
    _need_gpu()
    _quiet()  # the job sets the environment of each of its processes
    from arpo_megatron.bench.gpu.step import StepBench

    _run("step", {"job": StepBench(out.resolve() / "step").measure})


def _run(name: str, measurements: "Measurements") -> None:
    from arpo_megatron.bench.gpu.measure import run_all

    print(json.dumps({"benchmark": name, **run_all(measurements)}), flush=True)
    next_command("arpo", "bench", "gpu", "--help")


def _prepare() -> None:
    import os

    from arpo_megatron.hardware.environment import trainer_environment

    _need_gpu()
    os.environ.update(trainer_environment("auto"))
    _quiet()


def _need_gpu() -> None:
    from arpo_megatron.errors import UserError
    from arpo_megatron.hardware.placement import gpu_count

    if not gpu_count("auto"):
        raise UserError("arpo bench gpu needs a GPU, and torch finds none: `arpo bench --help` lists those for a CPU")


def _quiet() -> None:
    from arpo_megatron.actor.parallel import silence_import_warnings

    silence_import_warnings()
