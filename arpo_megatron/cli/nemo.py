"""Recipes for nemo-run: factories of `run.Config[JobConfig]` for Python, and `nemorun arpo train job=RECIPE`.

    from arpo_megatron.cli.nemo import factories
    recipe = factories["deepsearch_14b"]
    job = recipe(variants="4nodes+fp8")
    job.train.steps = 10

    nemorun arpo train job=deepsearch_14b job.model.path=DIR job.train.steps=10
    nemorun arpo train "job=quickstart(preset='grpo')"
    nemorun arpo submit job=deepsearch_14b cluster=h100 then=export,eval
    nemorun arpo eval target=runs/deepsearch_14b-arpo-seed1 cluster=h100

    with run.Experiment("search") as experiment:
        experiment.add(run.Partial(train, job=job), executor=slurm_executor("h100", nodes=4))
        experiment.run()

nemo-run builds a `JobConfig` from such a config; it is validated like a config of the command line. An executor with
several tasks starts one job (`cluster/executor_tasks.py`). Importing nemo-run takes seconds, so no other module imports
this one.
"""

import dataclasses
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PosixPath
from typing import Any

import nemo_run as run
import yaml
from fiddle import daglish
from nemo_run.cli import cli_parser
from nemo_run.core.serialization.yaml import _config_representer

from arpo_megatron.cli.jobs import following
from arpo_megatron.cluster import executor_tasks
from arpo_megatron.cluster.executor import profile_of_executor, slurm_executor
from arpo_megatron.cluster.submit_run import SubmittedRun, submit_run
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RUNS

# nemo-run 0.11.1 can parse Optional[Path], but not Path | None.
cli_parser.type_parser.register_parser(types.UnionType)(cli_parser.type_parser.parse_union)

# Its serializers refuse paths. A path is written as the one value that makes it.
daglish.register_node_traverser(
    PosixPath,
    flatten_fn=lambda path: ((str(path),), None),
    unflatten_fn=lambda values, _: Path(*values),
    path_elements_fn=lambda _: (daglish.Index(0),),
)
yaml.SafeDumper.add_representer(PosixPath, lambda dumper, path: dumper.represent_str(str(path)))

__all__ = ["evaluate", "export", "factories", "sft", "slurm_executor", "submit", "train"]

Factory = Callable[..., "run.Config[JobConfig]"]


class JobRecipe(run.Config[JobConfig]):  # type: ignore[misc]  # nemo-run has no types
    """A `run.Config` of a job. Reading one from a file imports this module before it reaches the first path."""


yaml.SafeDumper.add_representer(JobRecipe, _config_representer)


def configured(value: Any) -> Any:
    """Convert a (nested) config to `run.Config`, with every section and with values that differ from their default."""
    if not dataclasses.is_dataclass(value):
        return value
    kind: Any = type(value)
    values = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item) or item != kind.__pydantic_fields__[field.name].default:
            values[field.name] = configured(item)
    return run.Config(kind, **values)


def checked(laid_preset: str, **values: Any) -> JobConfig:
    """Build a validated job with absolute paths from the values of a recipe's config.

    Args:
        laid_preset: `algorithm.name` when the factory applied the preset's components and params. A later change of
            the name would not apply another preset, so it is an error.
        values: config values by key.

    Raises:
        UserError: `algorithm.name` was changed, or the config is invalid.
    """
    job = JobConfig(**values)
    if job.algorithm.name != laid_preset:
        raise UserError(
            f"algorithm.name={job.algorithm.name} cannot replace the preset {laid_preset} here: "
            f"use job=RECIPE(preset='{job.algorithm.name}')"
        )
    return resolve.with_overrides(job, ())


# nemo-run takes the names and types of `job.KEY=VALUE` from this signature.
_JOB_SIGNATURE = inspect.signature(JobConfig)
checked.__signature__ = _JOB_SIGNATURE.replace(  # type: ignore[attr-defined]  # typeshed does not know it
    parameters=[
        *_JOB_SIGNATURE.parameters.values(),
        inspect.Parameter("laid_preset", inspect.Parameter.KEYWORD_ONLY, annotation=str),
    ]
)


def _factory(name: str) -> Factory:
    def recipe(variants: str = "", preset: str = "") -> run.Config[JobConfig]:
        overrides = [f"algorithm.name={preset}"] if preset else []
        job = resolve.resolve("+".join([name, *filter(None, variants.split("+"))]), overrides=overrides)
        sections = {field.name: configured(getattr(job, field.name)) for field in dataclasses.fields(job)}
        return JobRecipe(checked, laid_preset=job.algorithm.name, **sections)

    recipe.__name__ = recipe.__qualname__ = name
    recipe.__doc__ = importlib.import_module(f"arpo_megatron.recipes.{name}").__doc__
    registered: Factory = run.cli.factory(recipe, target=JobConfig, name=name)
    return registered


factories: Mapping[str, Factory] = {name: _factory(name) for name in resolve.recipe_names()}
"""Factories by recipe name. `variants` are joined by `+` as in `RECIPE+VARIANT`; `preset` sets `algorithm.name`."""


def train(job: JobConfig, resume: bool = False) -> None:
    """Train a recipe: the cold start if it has one, the ARPO loop, and the export.

    The job runs on this machine, or on all nodes of the allocation of a Slurm executor.
    """
    from arpo_megatron.launch.job import run_job

    _start(job, resume, run_job, only_sft=False)


def sft(job: JobConfig, resume: bool = False) -> None:
    """Run only the cold start of a recipe and export the model, where `train` would run."""
    from arpo_megatron.launch.job import run_sft

    _start(job, resume, run_sft, only_sft=True)


def _start(job: JobConfig, resume: bool, on_this_machine: Callable[..., object], *, only_sft: bool) -> None:
    job = resolve.with_overrides(job, ())
    allocated = profile_of_executor() is not None or executor_tasks.nodes_of_executor() > 1
    with _once(job.run_dir or RUNS / job.name) as first:
        if first and allocated:
            executor_tasks.run_on_allocation(job, resume=resume, only_sft=only_sft)
        elif first:
            on_this_machine(job, resume=resume)


def export(run_dir: str, step: int | None = None, out: str | None = None, cluster: str | None = None) -> None:
    """Convert a checkpoint of a run to a Hugging Face directory, like `arpo export`."""
    from arpo_megatron.cli.main import export as command

    with _once(run_dir) as first:
        if first:
            command(run_dir, step=step, out=None if out is None else Path(out), cluster=cluster)


def evaluate(
    target: str,
    overrides: list[str] | None = None,
    suite: str | None = None,
    k: int = 1,
    step: int | None = None,
    data: str | None = None,
    skip_missing: bool = False,
    out: str | None = None,
    cluster: str | None = None,
) -> None:
    """Answer benchmarks or held-out tasks with a model and tools, like `arpo eval`."""
    from arpo_megatron.cli.evaluation import DATA
    from arpo_megatron.cli.evaluation import evaluate as command

    with _once(target) as first:
        if first:
            command(
                target,
                overrides or [],
                suite=suite,
                k=k,
                step=step,
                data=DATA if data is None else Path(data),
                skip_missing=skip_missing,
                out=None if out is None else Path(out),
                cluster=cluster,
            )


def submit(
    job: JobConfig, cluster: str, nodes: int | None = None, chain: int = 1, then: str | None = None, force: bool = False
) -> SubmittedRun:
    """Submit a recipe to a Slurm cluster, like `arpo submit`. `job` has the layout: `RECIPE(variants='4nodes')`."""
    submitted = submit_run(job, cluster, nodes=nodes, chain=chain, then=following(then), force=force)
    print(submitted)
    return submitted


def _once(run: str | Path) -> AbstractContextManager[bool]:
    """Yield True in the first of an executor's tasks for a run; the others wait. Raises UserError."""
    executor_tasks.check_launcher()
    return executor_tasks.first_task(Path(run).absolute().parent)


for _function, _name, _help in (
    (train, "train", "Train a recipe, like `arpo train`."),
    (sft, "sft", "Run only the cold start of a recipe, like `arpo sft`."),
    (evaluate, "eval", "Evaluate a run, a model or a server, like `arpo eval`."),
    (export, "export", "Export a checkpoint of a run, like `arpo export`."),
    (submit, "submit", "Submit a recipe to a Slurm cluster, like `arpo submit`."),
):
    run.cli.entrypoint(namespace="arpo", name=_name, help=_help)(_function)
