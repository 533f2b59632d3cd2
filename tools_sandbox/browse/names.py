"""Names of hosts become addresses in threads of their own.

A name whose server does not answer holds a thread for as long as the system's resolver is patient (tens of seconds),
also after its call has ended. In the event loop's own threads that would stop whatever else uses them.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from aiohttp.abc import AbstractResolver, ResolveResult

_THREADS = ThreadPoolExecutor(64, "names")
"""So many names at a time; further ones wait, within the time of their calls."""


class Resolver(AbstractResolver):
    """The system's resolver, once for each connection: what it says is checked and used, and asked no second time."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Numeric addresses of a host. OSError: there is no such name, or nobody says so."""
        ask = partial(
            socket.getaddrinfo, host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
        found = await asyncio.get_running_loop().run_in_executor(_THREADS, ask)
        return [
            ResolveResult(
                hostname=host,
                # A scope names an interface, where the address is good on one alone.
                host=f"{address[0]}%{address[3]}" if len(address) > 2 and address[3] else str(address[0]),
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Nothing to give back: the threads are shared."""
