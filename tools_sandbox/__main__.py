"""``python -m tools_sandbox``: start the service, print ``ready http://host:port`` on stdout, serve until stopped."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path

from tools_sandbox.config import TOKEN_VARIABLE, ConfigError, load_config
from tools_sandbox.python_tool.pool import SandboxBroken
from tools_sandbox.service import descriptors
from tools_sandbox.utils import logs


class _CannotStartError(Exception):
    """The service cannot start as configured. The message is one line for the user."""


def _listen(host: str, port: int, token: str | None) -> socket.socket:
    """Return a listening socket. Without a token, only loopback addresses are accepted."""
    if not 0 <= port <= 65535:  # the resolver would take it modulo 65536
        raise _CannotStartError(f"port {port} is not between 0 and 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise _CannotStartError(f"cannot resolve {host}: {error}") from error
    if token is None and not ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback:
        raise _CannotStartError(f"{host} is open to other machines: set {TOKEN_VARIABLE}, or use 127.0.0.1")
    # The protocol is given since asyncio turns off Nagle's delay (40 ms per answer) only for sockets that name TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _CannotStartError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def _serve(arguments: argparse.Namespace) -> None:
    token = os.environ.get(TOKEN_VARIABLE) or None
    config = load_config(arguments.config)
    logs.set_up(config.log.format)
    budget = descriptors.plan_budget(descriptors.raise_limit(), config)
    with _listen(arguments.host, arguments.port, token) as listener:
        # Imported late (0.5 s), so that a bad file or a taken port is reported at once.
        from tools_sandbox.service.dispatch import ToolService
        from tools_sandbox.service.server import Server, build_app

        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        service = ToolService(config, budget)
        try:
            ready_line = f"ready http://{host}:{listener.getsockname()[1]}"
            app = build_app(service, token)
            server = Server(app, service, ready_line, budget.connections, needs_token=token is not None)
            server.run(sockets=[listener])
        finally:
            service.close()


def _stop(number: int, frame: object) -> None:
    # uvicorn repeats the signal after its shutdown, so a clean end also comes here.
    raise SystemExit(0)


def main() -> None:
    """Parse arguments and serve. Exit codes: 0 after SIGTERM or SIGINT, 2 if the service cannot start."""
    parser = argparse.ArgumentParser(prog="python -m tools_sandbox", description="The tool service.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0: any free port (default)")
    parser.add_argument("--config", type=Path, help="YAML file, see tools_sandbox/config.py")
    arguments = parser.parse_args()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, _stop)
    try:
        if sys.platform != "linux":
            raise _CannotStartError("needs Linux")
        _serve(arguments)
    except (_CannotStartError, ConfigError, SandboxBroken) as error:
        print(f"tools_sandbox: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
