"""`arpo view`: the pages of runs and trees."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arpo_megatron.cli.options import DryRun, Panel, complete_run, next_after_dry_run, next_command
from arpo_megatron.errors import UserError
from arpo_megatron.serving import TOKEN_VARIABLE

if TYPE_CHECKING:
    from arpo_megatron.view.grow import Grower
    from arpo_megatron.view.pages import Pages

app = typer.Typer()

Grow = Annotated[
    str | None,
    typer.Option(
        metavar="RUN|EXPORT|URL",
        help="Serve this agent, or use that of `arpo serve`: the page can then sample continuations at any node.",
        autocompletion=complete_run,
    ),
]

_TREES = 24
"""Most trees of each run in an exported file, unless --trees is given."""


@app.command(rich_help_panel=Panel.LOOK)
def view(
    run_dirs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run directories, names in runs/, or directories of runs; with --cluster also submitted runs.",
            autocompletion=complete_run,
        ),
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
    trees: Annotated[
        int | None, typer.Option(min=0, help=f"With --html: most trees of each run in the file. Default: {_TREES}.")
    ] = None,
    grow: Grow = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="Profile of the cluster that has the runs; its page comes through SSH."),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Show runs and their trees in a browser, live while they train, or as one HTML file.

    Prints the address of the page and serves it until ctrl-C.
    """
    from arpo_megatron.jobs.run_directory import run_path
    from arpo_megatron.view.pages import Pages
    from arpo_megatron.view.runs import find_runs
    from arpo_megatron.view.server import DEFAULT_PORT, serve

    most = _TREES if trees is None else trees
    _check_options(host, html, trees, grow, cluster)
    if dry_run:
        print("\n".join(_described(run_dirs, grow, cluster)))
        where = f"listen on {host}, port {DEFAULT_PORT if port is None else port or 'any free one'}"
        print(where if html is None else f"write {html}, at most {most} trees of each run")
        next_after_dry_run()
        return
    paths = [run_path(each) for each in run_dirs] if cluster is None else _on_cluster(cluster, run_dirs, port)
    pages = Pages(find_runs(paths))
    if html is not None:
        _write(pages, html, most)
        return
    with nullcontext() if grow is None else _agent(grow) as grower:
        serve(replace(pages, grower=grower), host=host, port=port, with_token=token)


def _check_options(host: str, html: Path | None, trees: int | None, grow: str | None, cluster: str | None) -> None:
    """Raise UserError for options that exclude each other."""
    from arpo_megatron.view.server import is_loopback

    if trees is not None and html is None:
        raise UserError("--trees is the number of trees in the file of --html: the server shows all of them")
    if html is not None and grow is not None:
        raise UserError("--grow needs a server: leave out --html")
    if cluster is not None and (html is not None or grow is not None):
        raise UserError("--html and --grow work where the run is: leave out --cluster, or run them there")
    if cluster is not None and not is_loopback(host):
        raise UserError("--cluster shows the page on this machine: leave out --host")


def _write(pages: "Pages", html: Path, trees: int) -> None:
    """Write the file of --html, at most `trees` trees of each run."""
    from arpo_megatron.view.export import write_html

    size = write_html(pages, html, trees=trees)
    print(f"{html}: {size / 1e6:.1f} MB, {len(pages.runs)} run(s), at most {trees} trees of each", file=sys.stderr)
    next_command("xdg-open", html)


def _described(names: list[str], grow: str | None, cluster: str | None) -> list[str]:
    """Return what would be shown. Raises UserError if there is no such run, agent or profile."""
    from arpo_megatron.cluster.profile import load_profile
    from arpo_megatron.evaluation.target import is_url
    from arpo_megatron.jobs.run_directory import run_path
    from arpo_megatron.view.runs import find_runs

    if cluster is not None:
        load_profile(cluster)
        return [f"show {', '.join(names)} of cluster {cluster}"]
    lines = [f"show {', '.join(find_runs([run_path(each) for each in names]))}"]
    if grow is not None and not is_url(grow):
        from arpo_megatron.serving.serve import describe, plan

        lines += describe(*plan(grow, (), or_url=True), plain=False)
    return lines if grow is None or not is_url(grow) else [*lines, f"grow branches with {grow}"]


def _on_cluster(cluster: str, names: list[str], port: int | None) -> list[Path]:
    """Show runs through the profile's login node until ctrl-C; return their directories if this machine is it."""
    from arpo_megatron.cluster.runs import find_run
    from arpo_megatron.cluster.ssh_page import serve_from_login_node
    from arpo_megatron.view.server import listen

    with listen("127.0.0.1", port) as free:
        local = int(free.getsockname()[1])
    serve_from_login_node(cluster, local, "view", *names, token=True, port=0)
    return [Path(each) if Path(each).is_dir() else find_run(each, cluster).path for each in names]


@contextmanager
def _agent(target: str) -> Iterator["Grower"]:
    """Yield the agent at a URL, or serve one inside the block. Raises UserError if it does not answer."""
    from arpo_megatron.view.grow import MAX_CONTINUATIONS, Grower

    if target.startswith(("http://", "https://")):
        grower = Grower(target, os.environ.get(TOKEN_VARIABLE, ""))
        grower.weights()
        yield grower
        return
    from arpo_megatron.serving.serve import serving
    from arpo_megatron.view.server import listen

    with serving(target, (), listen("127.0.0.1", 0), concurrency=MAX_CONTINUATIONS) as (url, key):
        yield Grower(url, key)
