"""Name resolution in separate threads.

A name whose server does not answer blocks a thread until the system's resolver gives up (tens of seconds), even after
its call has ended. In the event loop's default threads this would block all their other users.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from aiohttp.abc import AbstractResolver, ResolveResult

_THREADS = ThreadPoolExecutor(64, "names")
"""At most 64 names at a time. Others wait, within the time limit of their calls."""


class Resolver(AbstractResolver):
    """The system's resolver. It is asked once per connection, and its result is checked and then used."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the numeric addresses of a host. Raises OSError if the name does not exist or no server answers."""
        ask = partial(
            socket.getaddrinfo, host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
        found = await asyncio.get_running_loop().run_in_executor(_THREADS, ask)
        return [
            ResolveResult(
                hostname=host,
                # A scope names an interface; the address is valid only there.
                host=f"{address[0]}%{address[3]}" if len(address) > 2 and address[3] else str(address[0]),
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Do nothing: the threads are shared."""
