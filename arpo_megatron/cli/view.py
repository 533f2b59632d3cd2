"""`arpo view`: the pages of runs and trees."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from arpo_megatron.cli.options import Panel

app = typer.Typer()


@app.command(rich_help_panel=Panel.LOOK)
def view(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Run directories, or directories of runs such as runs/."),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on. One that other machines can reach asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0: any free one. Default: 8750, if it is free.")
    ] = None,
    token: Annotated[
        bool, typer.Option("--token", help="Ask for a token on this machine, too: other users share its loopback.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the pages to this file, which needs no server, and stop.")
    ] = None,
    trees: Annotated[int, typer.Option(min=0, help="With --html: most trees of each run in the file.")] = 24,
) -> None:
    """Show runs and their trees in a browser, live while they train, or as one HTML file.

    Prints the address of the page and serves it until ctrl-C.
    """
    from arpo_megatron.view.export import write_html
    from arpo_megatron.view.pages import Pages
    from arpo_megatron.view.runs import find_runs
    from arpo_megatron.view.server import serve

    pages = Pages(find_runs(run_dirs))
    if html is None:
        serve(pages, host=host, port=port, with_token=token)
        return
    size = write_html(pages, html, trees=trees)
    print(f"{html}: {size / 1e6:.1f} MB, {len(pages.runs)} run(s), at most {trees} trees of each", file=sys.stderr)
