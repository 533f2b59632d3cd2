"""A page that a login node serves, on a port of this machine: the command runs there, SSH forwards its port."""

import json
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import typer

from arpo_megatron.cluster.ssh import connected, login_node, payload_of
from arpo_megatron.errors import UserError

_POLL_S = 0.2


class _FirstLine:
    """The first line that a command prints; the rest goes to standard output."""

    def __init__(self) -> None:
        self._text = ""
        self.complete = threading.Event()

    @property
    def line(self) -> str:
        return self._text.partition("\n")[0].strip()

    def write(self, text: str) -> None:
        if self.complete.is_set():
            sys.stdout.write(text)
        self._text += text
        if "\n" in self._text:
            self.complete.set()

    def flush(self) -> None:
        sys.stdout.flush()


class _Input:
    """Standard input of the command: one text, then nothing until it is ended."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.ended = False

    def read(self, _count: int) -> str | None:
        """Return the text, then None while there may be more, and "" at the end."""
        text, self._text = self._text, ""
        return text or ("" if self.ended else None)


def serve_from_login_node(
    cluster: str, local_port: int, command: str, *arguments: str | None, **options: object
) -> None:
    """Run an `arpo` command that serves a page on the profile's login node, and print the page's address here.

    Exits with the command's code. Ends the command at an interrupt. Returns at once if the login node is this machine.

    Args:
        cluster: name or file of the profile.
        local_port: free port of this machine.
        command: prints the page's address as its first line.
        arguments: see `ssh.run_on_login_node`.
        options: see `ssh.run_on_login_node`.

    Raises:
        UserError: the login node cannot be reached, or the command prints no address.
    """
    if (node := login_node(cluster)) is None:
        return
    payload = payload_of(node, command, arguments, options) | {"until_closed": True}
    given, printed = _Input(json.dumps(payload) + "\n"), _FirstLine()
    with connected(node) as (tunnel, shell):
        streams = {"in_stream": given, "out_stream": printed, "err_stream": sys.stderr}
        running: Any = tunnel.run(shell, hide=False, warn=True, asynchronous=True, **streams)
        while not printed.complete.wait(_POLL_S):
            if running.runner.process_is_finished:
                raise typer.Exit(running.join().exited)
        page = urlsplit(printed.line)
        if page.port is None:
            raise UserError(f"{node.host} printed no address of a page but {printed.line!r}")
        try:
            with tunnel.session.forward_local(local_port, remote_port=page.port, remote_host="127.0.0.1"):
                print(f"http://127.0.0.1:{local_port}{page.path}?{page.query}", flush=True)
                while not running.runner.process_is_finished:
                    time.sleep(_POLL_S)
        finally:
            given.ended = True  # the command reads the end of its input, and stops
            exit_code = running.join().exited
        raise typer.Exit(exit_code)
