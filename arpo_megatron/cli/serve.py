"""`arpo serve` and `arpo chat`: talk to a trained agent."""

import os
import secrets
import socket
from contextlib import nullcontext
from typing import Annotated

import typer

from arpo_megatron.cli.jobs import step_model, submit_command
from arpo_megatron.cli.options import (
    DryRun,
    OnCluster,
    Overrides,
    Panel,
    complete_run,
    next_after_dry_run,
    next_command,
)
from arpo_megatron.serving import TOKEN_VARIABLE

app = typer.Typer()

DEFAULT_PORT = 8751
Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN|EXPORT",
        help="Run (directory, or name in runs/), or Hugging Face directory.",
        autocompletion=complete_run,
    ),
]


@app.command(rich_help_panel=Panel.EVALUATE)
def serve(
    target: Target,
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. One that other machines can reach asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port; 0: any free one. Default: 8751; in a Slurm job any free one."),
    ] = None,
    token: Annotated[bool, typer.Option("--token", help="Ask for a token on this machine, too.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Pass requests to the engine; run no tools.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers at a time; further requests get 429.")] = 32,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the plain SGLang and vLLM commands instead, and stop.")
    ] = False,
    dry_run: DryRun = False,
    cluster: OnCluster = None,
    step: Annotated[int | None, typer.Option(help="For a run: its export of this step's checkpoint.")] = None,
) -> None:
    """Serve a trained agent with OpenAI's chat protocol: it calls its tools by itself and streams what it writes.

    Prints the address when it answers. A token in ARPO_SERVE_TOKEN is always asked for; without one, a needed token is
    made and printed. A Slurm job listens on its node's address, asks for a token, and writes both to its log
    (`arpo logs RUN --service serve`).
    """
    if cluster is not None:
        given = {"step": step, "port": port, "plain": plain, "concurrency": concurrency}
        submit_command(cluster, "serve", target, *(overrides or ()), **given, dry_run=dry_run)
        return
    from arpo_megatron.serving.serve import ServeRequest, describe, plain_commands, plan
    from arpo_megatron.serving.serve import serve as run
    from arpo_megatron.view.server import address_of, is_loopback, listen

    model = None if step is None or dry_run else step_model(target, step, None)
    if print_only:
        print("\n".join(plain_commands(*plan(target, overrides or (), model))))
        of_step = [] if step is None else ["--step", step]
        next_command("arpo", "serve", target, *(overrides or ()), *of_step, "--plain")
        return
    if dry_run:
        print("\n".join(describe(*plan(target, overrides or (), model), plain=plain)))
        print(f"listen on {host}, port {DEFAULT_PORT if port is None else port or 'any free one'}")
        next_after_dry_run()
        return
    wanted = DEFAULT_PORT if port is None else port
    secret = os.environ.get(TOKEN_VARIABLE) or None
    if secret is None and (token or not is_loopback(host)):
        secret = secrets.token_urlsafe(24)
        typer.echo(f"token: {secret}", err=True)

    def bind() -> tuple[socket.socket, str]:
        listening = listen(host, wanted)
        return listening, address_of(host, listening)

    run(ServeRequest(target, overrides or (), plain, secret, concurrency, model), bind)


@app.command(rich_help_panel=Panel.EVALUATE)
def chat(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|EXPORT|URL",
            help="What to serve and talk to, or the URL of `arpo serve`.",
            autocompletion=complete_run,
        ),
    ],
    overrides: Overrides = None,
    show_entropy: Annotated[
        bool,
        typer.Option("--show-entropy", help="Color uncertain text: yellow from 0.2 nats, red from 0.7, bold from 1.5."),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Talk to an agent in the terminal: its text as it is written, its tool calls, and their results.

    An empty line ends the conversation. Exits with code 1 if every question failed. For a URL, ARPO_SERVE_TOKEN is the
    token of its server.
    """
    from rich.console import Console

    from arpo_megatron.evaluation.target import is_url
    from arpo_megatron.serving.chat import chat as talk
    from arpo_megatron.serving.chat import from_terminal
    from arpo_megatron.serving.serve import describe, plan, serving
    from arpo_megatron.view.server import listen

    given = overrides or ()
    if dry_run:
        served = f"talk to {target}" if is_url(target) else describe(*plan(target, given, or_url=True), plain=False)
        print(served if isinstance(served, str) else "\n".join(served))
        next_after_dry_run()
        return
    at = nullcontext((target, os.environ.get(TOKEN_VARIABLE, "")))
    with at if is_url(target) else serving(target, given, listen("127.0.0.1", 0)) as (url, key):
        answered = talk(url, key, console=Console(highlight=False), read=from_terminal, show_entropy=show_entropy)
    next_command("arpo", *(["chat", target] if is_url(target) else ["serve", target, *given]))
    if not answered:
        raise typer.Exit(1)
