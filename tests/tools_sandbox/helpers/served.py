"""A helper that serves an aiohttp application in a thread, for code under test that blocks or is another process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def serving(app: web.Application, *hosts: str) -> Iterator[int]:
    """Serve on every host (default: 127.0.0.1) at one free port, and yield the port."""
    ports, stop, loop = list[int](), asyncio.Event(), asyncio.new_event_loop()
    ready = threading.Event()

    async def serve() -> None:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        for host in hosts or ("127.0.0.1",):
            await web.TCPSite(runner, host, ports[0] if ports else 0).start()
            ports.append(runner.addresses[0][1])
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(240)  # long only on a very busy machine
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
