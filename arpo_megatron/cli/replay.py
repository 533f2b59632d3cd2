"""`arpo recompute-update` and `arpo replay-tree`: compute again what a run has stored."""

from pathlib import Path
from typing import Annotated

import typer

from arpo_megatron.cli.options import Panel, next_command, open_run

app = typer.Typer()


@app.command("recompute-update", rich_help_panel=Panel.MEASURE)
def recompute_update(
    file: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="Dump of a skipped update: RUN_DIR/skipped_updates/*.npz."),
    ],
) -> None:
    """Compute a skipped update again and report which of its quantities are not finite.

    The weights come from the run's newest complete checkpoint. The run is not changed.
    """
    from arpo_megatron.launch.job import recompute_skipped_update

    run = open_run(file.resolve().parent.parent)
    print(recompute_skipped_update(run, file), end="", flush=True)
    next_command("arpo", "view", run.path)


@app.command("replay-tree", rich_help_panel=Panel.MEASURE)
def replay_tree(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="Stored trees: RUN_DIR/trees/step_N.parquet.")
    ],
    tree: Annotated[int | None, typer.Option(min=0, help="Number of the tree to check; default: all.")] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Config of the run; default: config.yaml of the file's run directory."),
    ] = None,
) -> None:
    """Recompute every branching decision of stored trees from tree, entropies and seed.

    Prints the first difference and exits with code 1 if there is one.
    """
    from arpo_megatron.cli.trees import replay_trees

    same = replay_trees(file, tree=tree, config=config)
    next_command("arpo", "view", file.resolve().parent.parent)
    if not same:
        raise typer.Exit(1)
