"""Recipes for nemo-run: factories of `run.Config[JobConfig]` from Python, `nemorun arpo train job=RECIPE` in a shell.

    from arpo_megatron.cli.nemo import factories
    recipe = factories["deepsearch_14b"]
    job = recipe(variants="4nodes+fp8")
    job.train.steps = 10

    nemorun arpo train job=deepsearch_14b job.model.path=DIR job.train.steps=10
    nemorun arpo train "job=quickstart(preset='grpo')"

What nemo-run builds from such a config is a `JobConfig`, checked as the command line checks its own. Importing nemo-run
takes seconds, so nothing else imports this module.
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

# nemo-run 0.11.1 reads Optional[Path], but not Path | None.
cli_parser.type_parser.register_parser(types.UnionType)(cli_parser.type_parser.parse_union)

Factory = Callable[..., "run.Config[JobConfig]"]


def configured(value: Any) -> Any:
    """A (nested) config as nemo-run's: sections that can be changed key by key, values that are not defaults."""
    if not dataclasses.is_dataclass(value):
        return value
    kind: Any = type(value)
    given = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item) or item != kind.__pydantic_fields__[field.name].default:
            given[field.name] = configured(item)
    return run.Config(kind, **given)


def checked(laid_preset: str, **values: Any) -> JobConfig:
    """What a recipe's config builds: the job, checked, with absolute paths.

    Args:
        laid_preset: `algorithm.name` as the factory gave it. Only there a preset's parts and numbers are laid, so that
            another name afterwards would be a job that is called after a method which it does not train.
        values: of the job, by its keys.

    Raises:
        UserError: `algorithm.name` was changed, or what `resolve.check` finds.
    """
    job = JobConfig(**values)
    if job.algorithm.name != laid_preset:
        raise UserError(
            f"algorithm.name={job.algorithm.name} alone leaves the method as it is ({laid_preset}): "
            f"make the recipe with it, job=RECIPE(preset='{job.algorithm.name}')"
        )
    return resolve.with_overrides(job, ())


# nemo-run reads names and types of `job.KEY=VALUE` here: those of a job.
_OF_JOB = inspect.signature(JobConfig)
checked.__signature__ = _OF_JOB.replace(  # type: ignore[attr-defined]
    parameters=[
        *_OF_JOB.parameters.values(),
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
"""By recipe; `variants` are those of `RECIPE+variant`, joined by `+`; `preset` is that of `algorithm.name=PRESET`."""


def train(job: JobConfig, resume: bool = False) -> None:
    """The whole job: cold start where it has one, the ARPO loop, and the export."""
    from arpo_megatron.launch.job import run_job

    run_job(resolve.with_overrides(job, ()), resume=resume)


def sft(job: JobConfig, resume: bool = False) -> None:
    """Supervised training, and the export."""
    from arpo_megatron.launch.job import run_sft

    run_sft(resolve.with_overrides(job, ()), resume=resume)


run.cli.entrypoint(namespace="arpo", help="Run a recipe on this machine, as `arpo train` does.")(train)
run.cli.entrypoint(namespace="arpo", help="Run only the cold start of a recipe, as `arpo sft` does.")(sft)
