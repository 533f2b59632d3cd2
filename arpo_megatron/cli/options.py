"""Arguments and options that several commands share, the panels of the help, and the line that ends a command."""

import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from arpo_megatron.errors import UserError

if TYPE_CHECKING:
    from arpo_megatron.jobs.run_directory import RunDirectory


P = ParamSpec("P")


class Panel(StrEnum):
    """Panels of `arpo --help`, in their order."""

    START = "Start"
    TRAIN = "Train"
    LOOK = "Look"
    EVALUATE = "Evaluate"
    CLUSTER = "On a cluster"
    MEASURE = "Measure and check"


def next_command(*words: object) -> None:
    """Print the command that usually follows, quoted for a shell, on standard error: standard output is for results."""
    sys.stdout.flush()  # where both go to one file, the result comes first
    print(f"next: {shlex.join(map(str, words))}", file=sys.stderr, flush=True)


def next_after_dry_run() -> None:
    """Print the command of this process without --dry-run as the one that follows."""
    next_command(*own_command(without="--dry-run"))


def own_command(*more: str, without: str = "") -> list[str]:
    """Return the words of this process's command, with further ones or without one of its own."""
    return ["arpo", *(each for each in sys.argv[1:] if each != without), *more]


def job_words(recipe: str, overrides: Sequence[str] | None, config: Path | None = None) -> list[str]:
    """Return the words that name the same job in another command."""
    return [recipe, *(overrides or ()), *([] if config is None else ["--config", str(config)])]


def with_dry_run(function: Callable[P, None]) -> Callable[P, None]:
    """Add --dry-run to a command: it prints what the command would do, with its arguments, then stops."""

    @wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        if not kwargs.pop("dry_run"):
            return function(*args, **kwargs)
        print((function.__doc__ or "").splitlines()[0])
        for name, value in kwargs.items():
            shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
            print(f"  {name.replace('_', '-')}: {'default' if shown is None else shown}")
        return next_after_dry_run()

    own = inspect.signature(function)
    extra = inspect.Parameter("dry_run", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DryRun)
    vars(command)["__signature__"] = own.replace(parameters=[*own.parameters.values(), extra])
    command.__annotations__ = {**function.__annotations__, "dry_run": DryRun}
    return command


def open_run(path: Path) -> "RunDirectory":
    """Return the run at `path`, or of this name in runs/. Raises UserError if there is none."""
    from arpo_megatron.jobs.run_directory import RunDirectory, run_path

    run = RunDirectory(run_path(path))
    if not run.config.is_file():
        raise UserError(f"{path} is not a run directory: it has no config.yaml")
    return run


def complete_recipe(typed: str) -> list[str]:
    """Return the recipes, or after a + the variants, that begin with the typed text."""
    from arpo_megatron.jobs.resolve import recipe_names, variant_names

    name, plus, _ = typed.partition("+")
    if not plus:
        return [each for each in recipe_names() if each.startswith(typed)]
    return [f"{name}+{each}" for each in variant_names(name) if f"{name}+{each}".startswith(typed)]


def complete_override(typed: str) -> list[str]:
    """Return the config keys that begin with the typed text."""
    from arpo_megatron.config import JobConfig
    from arpo_megatron.config.io import config_keys

    return [f"{key}=" for key in config_keys(JobConfig) if key.startswith(typed)]


def complete_run(typed: str) -> list[str]:
    """Return the directories that begin with the typed path, and the runs in runs/ that begin with a typed name.

    A directory that is no run ends with a slash: there may be runs, or the export of one, below it.
    """
    from arpo_megatron.jobs.run_directory import RUNS

    head, slash, start = typed.rpartition("/")
    names = [] if slash else [each.removesuffix("/") for each in _directories(RUNS, start) if each[-1] != "/"]
    return names + [f"{head}{slash}{each}" for each in _directories(Path(f"{head}{slash}" or "."), start)]


def _directories(folder: Path, start: str) -> list[str]:
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    shown = [path for path in found if path.name.startswith(start) and (start or path.name[0] != ".") and path.is_dir()]
    return [f"{path.name}{'' if (path / 'config.yaml').is_file() else '/'}" for path in shown]


Recipe = Annotated[
    str,
    typer.Argument(
        help="Recipe, its file (./my.py), or RECIPE+VARIANT+...; see `arpo list recipes`.",
        autocompletion=complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Config overrides, e.g. evaluation.temperature=0 engine.replicas=2",
        autocompletion=complete_override,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file with config values; they override the recipe's.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what the command would do, then stop.")]
RunDir = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory, or a name in runs/", autocompletion=complete_run)
]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Run directory, a name in runs/, or a submitted run.", autocompletion=complete_run
    ),
]
ClusterOfRun = Annotated[
    str | None,
    typer.Option("--cluster", help="Cluster profile that the run was submitted with; searches only its `runs`."),
]
OnCluster = Annotated[
    str | None,
    typer.Option("--cluster", help="Submit it as a Slurm job of its own: a name in slurm/clusters, or a file."),
]
