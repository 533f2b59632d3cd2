"""`arpo bench ...`: measurements, side by side in one run. The last line of standard output is one JSON object."""

import json
import os
from enum import StrEnum
from typing import Annotated, Any

import typer

from arpo_megatron import resolve
from arpo_megatron.processes import CPU_ENVIRONMENT

app = typer.Typer(no_args_is_help=True, help="Measure, side by side in one run; the last line is one JSON object.")


class MixName(StrEnum):
    """Families of trees (bench/mixes.py)."""

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


def _answer(name: str, figures: dict[str, Any]) -> None:
    print(json.dumps({"benchmark": name, **figures}), flush=True)
