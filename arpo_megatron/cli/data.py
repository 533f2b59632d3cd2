"""`arpo data check`: what a job would read from a file of questions."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from arpo_megatron.cli.options import Overrides, next_command

app = typer.Typer(no_args_is_help=True, help="Check a file of questions.")


@app.callback()
def data() -> None:
    """Make `check` a command of its own, not the only one."""


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Question file, or directory of a dataset.")],
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="Recipe with the limits of prompts and responses.")] = "reasoning_7b",
) -> None:
    """Show five prompts as the model gets them, lengths, bad rows, and the expected tokens of a step.

    With model.path=DIR its chat template and tokenizer are used.
    """
    from arpo_megatron.jobs.inputs import JobData, load_tokenizer, write_tool_files
    from arpo_megatron.jobs.resolve import resolve
    from arpo_megatron.jobs.run_directory import RunDirectory
    from arpo_megatron.launch.tool_check import check_tools
    from arpo_megatron.plan.data_check import describe_data

    config = resolve(recipe, overrides=["data.kind=files", f"data.path={file}", *(overrides or ())])
    tokenizer = None if config.model.path is None else load_tokenizer(config.model.path)
    with tempfile.TemporaryDirectory(prefix="arpo-data-check-") as folder:
        run = RunDirectory(Path(folder))
        write_tool_files(config, run, JobData((), ()))
        check_tools(config, run)  # writes the definitions of tools that the job names
        for line in describe_data(config, run, tokenizer):
            print(line)
    sys.stdout.flush()
    next_command(f"arpo train {recipe} data.path={file} --dry-run")
