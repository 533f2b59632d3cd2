"""Recipes for nemo-run: factories of `run.Config[JobConfig]` for Python, and `nemorun arpo train job=RECIPE`.

    from arpo_megatron.cli.nemo import factories
    recipe = factories["deepsearch_14b"]
    job = recipe(variants="4nodes+fp8")
    job.train.steps = 10

    nemorun arpo train job=deepsearch_14b job.model.path=DIR job.train.steps=10
    nemorun arpo train "job=quickstart(preset='grpo')"

nemo-run builds a `JobConfig` from such a config; it is validated like a config of the command line. Importing nemo-run
takes seconds, so no other module imports this one.
"""

import dataclasses
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import nemo_run as run
from nemo_run.cli import cli_parser

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve

# nemo-run 0.11.1 can parse Optional[Path], but not Path | None.
cli_parser.type_parser.register_parser(types.UnionType)(cli_parser.type_parser.parse_union)

Factory = Callable[..., "run.Config[JobConfig]"]


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
checked.__signature__ = _JOB_SIGNATURE.replace(  # type: ignore[attr-defined]
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
        return run.Config(checked, laid_preset=job.algorithm.name, **sections)

    recipe.__name__ = recipe.__qualname__ = name
    recipe.__doc__ = importlib.import_module(f"arpo_megatron.recipes.{name}").__doc__
    registered: Factory = run.cli.factory(recipe, target=JobConfig, name=name)
    return registered


factories: Mapping[str, Factory] = {name: _factory(name) for name in resolve.recipe_names()}
"""Factories by recipe name. `variants` are joined by `+` as in `RECIPE+VARIANT`; `preset` sets `algorithm.name`."""


def train(job: JobConfig, resume: bool = False) -> None:
    """Train a recipe on this machine: the cold start if it has one, the ARPO loop, and the export."""
    from arpo_megatron.launch.job import run_job

    run_job(resolve.with_overrides(job, ()), resume=resume)


def sft(job: JobConfig, resume: bool = False) -> None:
    """Run only the cold start of a recipe and export the model."""
    from arpo_megatron.launch.job import run_sft

    run_sft(resolve.with_overrides(job, ()), resume=resume)


run.cli.entrypoint(namespace="arpo", help="Train a recipe on this machine, like `arpo train`.")(train)
run.cli.entrypoint(namespace="arpo", help="Run only the cold start of a recipe, like `arpo sft`.")(sft)
