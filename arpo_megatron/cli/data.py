"""`arpo data`: what a job would read from a file of questions, and files made from other packages' tasks."""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from arpo_megatron.cli.options import Overrides, job_words, next_command, with_dry_run
from arpo_megatron.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Check a file of questions, or make one from a verifiers environment.")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Question file, or directory of a dataset.")],
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="Recipe with the limits of prompts and responses.")] = "reasoning_7b",
    every: Annotated[bool, typer.Option("--all", help="Show every bad row, not only the first five.")] = False,
) -> None:
    """Show five prompts as the model gets them, lengths, bad rows, and the expected tokens of a step.

    With model.path=DIR its chat template and tokenizer are used, and too long prompts are bad rows.
    """
    from arpo_megatron.jobs.inputs import JobData, load_tokenizer, write_tool_files
    from arpo_megatron.jobs.resolve import explicit_keys, override_layers, resolve
    from arpo_megatron.jobs.run_directory import RunDirectory
    from arpo_megatron.launch.tool_check import check_tools
    from arpo_megatron.plan.data_check import describe_data

    if any(re.match(r"data\.path(\.|$)", key) for key in explicit_keys(override_layers(overrides or ()))):
        raise UserError(f"{file} and the override data.path=... name the data twice: leave out data.path")
    given = ["data.kind=files", f"data.path={file}", *(overrides or ())]
    config = resolve(recipe, overrides=given)
    tokenizer = None if config.model.path is None else load_tokenizer(config.model.path)
    with tempfile.TemporaryDirectory(prefix="arpo-data-check-") as folder:
        run = RunDirectory(Path(folder))
        write_tool_files(config, run, JobData((), ()))
        check_tools(config, run)  # writes the definitions of tools that the job names
        for line in describe_data(config, run, tokenizer, every=every):
            print(line)
    sys.stdout.flush()
    next_command("arpo", "train", *job_words(recipe, given), "--dry-run")


@app.command()
@with_dry_run
def from_verifiers(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The `[env]` block of a verifiers run.")],
    python: Annotated[Path, typer.Option(help="Interpreter of the environment in which verifiers is installed.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (JSON lines).")],
    limit: Annotated[int, typer.Option(min=1, help="Use this many tasks of the taskset, from its first.")] = 1000,
) -> None:
    """Write the tasks of a verifiers environment as questions, for rollout.environment=verifiers.

    The environment begins an episode of each task, so that a row has all messages that the model gets.
    """
    from arpo_megatron.tasks.environments.verifiers.environment import VerifiersEnvironment
    from arpo_megatron.tasks.environments.verifiers.rows import task_rows
    from arpo_megatron.utils.atomic import atomic_write

    try:
        environment = VerifiersEnvironment(str(config), str(python))
    except ValueError as error:
        raise UserError(str(error)) from None
    with atomic_write(output) as part, part.open("w", encoding="utf-8") as file:
        for written, row in enumerate(task_rows(environment, limit), 1):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            if sys.stderr.isatty():
                print(f"\r{written} tasks", end="", file=sys.stderr, flush=True)
    print(f"{output}: {written} tasks")
    params = f"{{config: {config}, python: {python}}}"
    next_command(
        *("arpo", "train", "RECIPE", f"data.path={output}", "rollout.environment=verifiers"),
        *("reward.kind=environment", f"rollout.environment_params={params}"),
    )
