"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[str, typer.Argument(help="Recipe, or RECIPE+VARIANT+...; `arpo recipes` lists both.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Config overrides, e.g. evaluation.temperature=0 engine.replicas=2"),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file with config values; they override the recipe's.")
]
