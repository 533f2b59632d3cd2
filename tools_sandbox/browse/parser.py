"""Each page is parsed in a process of its own, forked from one that has loaded the parser.

A page can make its parser take gigabytes or minutes, and nothing but its end stops it. So it has a bounded memory, ends
with its call, and no other page, search or worker waits for it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from tools_sandbox.browse.fetch import FetchFailed, Page
from tools_sandbox.python_tool import linux

_MIB = 1 << 20
_THREADS = ThreadPoolExecutor(256, "parser")
"""They only wait: one for each page that is being parsed."""


class PageParser:
    """Belongs to one event loop. memory_mb: what a page may take, in MiB, beyond what the loaded parser does."""

    def __init__(self, memory_mb: int) -> None:
        self._memory_mb = memory_mb
        self._processes = multiprocessing.get_context("forkserver")
        loaded = ["tools_sandbox.worker", "tools_sandbox.browse.parser", "tools_sandbox.browse.page", "trafilatura"]
        self._processes.set_forkserver_preload(loaded)

    async def readable(self, page: Page) -> str:
        """As `page.readable`; cancelled, it ends the parser. FetchFailed."""
        ours, theirs = self._processes.Pipe(duplex=False)
        process = self._processes.Process(target=_parse, args=(theirs, page, self._memory_mb), daemon=True)
        loop = asyncio.get_running_loop()
        with ours, theirs:
            # Not in the loop: the first one also starts the process that all are forked from.
            starting = loop.run_in_executor(_THREADS, process.start)
            receiving: asyncio.Future[str | tuple[str, bool]] | None = None
            try:
                await asyncio.shield(starting)
                theirs.close()
                receiving = loop.run_in_executor(_THREADS, ours.recv)
                found = await asyncio.shield(receiving)
            except EOFError as error:
                message = f"{page.url} cannot be parsed within {self._memory_mb} MiB."
                raise FetchFailed(message, lasting=True) from error
            finally:
                await asyncio.wait([starting])
                if starting.exception() is None and process.is_alive():
                    process.kill()
                if receiving is not None:
                    # Without the process nothing holds the other end of the pipe, so this is at once.
                    await asyncio.wait([receiving])
        if isinstance(found, tuple):
            raise FetchFailed(found[0], lasting=found[1])
        return found


def _parse(answers: Connection, page: Page, memory_mb: int) -> None:
    """In the page's own process."""
    linux.die_with_parent(signal.SIGKILL)
    from tools_sandbox.browse.page import readable

    loaded = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = loaded + memory_mb * _MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        found: str | tuple[str, bool] = readable(page)
    except FetchFailed as error:
        found = (str(error), error.lasting)
    except MemoryError:
        return
    answers.send(found)
