"""A helper that serves an aiohttp application in a thread, for code under test that blocks or is another process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


def listen(*hosts: str) -> list[socket.socket]:
    """Listen at one port on every host; retry if the first host's port is taken on another."""
    for _ in range(20):
        sockets = list[socket.socket]()
        try:
            for host in hosts:
                port = sockets[0].getsockname()[1] if sockets else 0
                sockets.append(socket.create_server((host, port)))
            return sockets
        except OSError:
            for each in sockets:
                each.close()
    raise OSError(f"no port is free on all of {hosts}")


@contextmanager
def serving(app: web.Application, *hosts: str) -> Iterator[int]:
    """Serve on every host (default: 127.0.0.1) at one free port, and yield the port."""
    stop, loop, ready = asyncio.Event(), asyncio.new_event_loop(), threading.Event()
    sockets = listen(*(hosts or ("127.0.0.1",)))

    async def serve() -> None:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        for each in sockets:
            await web.SockSite(runner, each).start()
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(240)  # long only on a very busy machine
        yield sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
