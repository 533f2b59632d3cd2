"""Faults for tests: broken connections, failing and slow tools, full disks.

Faults of processes (kill, stop) are done to the real engines and the real tool service; two proxies break what is
between: a TCP proxy that cuts connections, and an HTTP proxy before the tool service that is slow, fails, and has a
search of its own that answers 10 MB.
"""

import asyncio
import errno
import os
import random
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp
import pytest
from aiohttp import web

T = TypeVar("T", "CutProxy", "ToolProxy")
FAILURES_A_CALL = 4  # one more, and the client takes them for lasting
PAGE = "0123456789 " * 950_000  # 10 MB
FULL = ("tmpfs", "file-size-limit")


@contextmanager
def small_disk(folder: Path, size: int, kind: str = FULL[0]) -> Iterator[str]:
    """Limit the space at `folder` in one of the ways `FULL`; yield the system's error message for a full disk.

    Args:
        folder: an empty directory; a file system that is mounted there is lost afterwards.
        size: bytes of a separate file system, or of each file that this process writes anywhere.
        kind: one of `FULL`; the test is skipped if a tmpfs cannot be mounted.
    """
    if kind == "tmpfs":
        command = ["mount", "-t", kind, "-o", f"size={size}", kind, str(folder)]
        mounted = subprocess.run(command, capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
        try:
            yield os.strerror(errno.ENOSPC)
        finally:
            # Lazily, because a process that failed there may not have ended yet.
            subprocess.run(["umount", "-l", str(folder)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield os.strerror(errno.EFBIG)
    finally:
        with suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


TRACER = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
assert libc.ptrace(0x4206, int(sys.argv[1]), None, None) == 0, ctypes.get_errno()  # PTRACE_SEIZE
print("holds", flush=True)
time.sleep(600)
"""


@contextmanager
def without_end(pid: int) -> Iterator[None]:
    """Keep a child process from ending for its parent, as the kernel does while it waits for a device.

    A process that another one traces is not reported as ended until its tracer lets it go.
    """
    command = [sys.executable, "-c", TRACER, str(pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None and tracer.stdout.readline() == b"holds\n"
        try:
            yield
        finally:
            tracer.kill()


class Proxies:
    """Runs proxies in an event loop of a thread. Also a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._opened: list[CutProxy | ToolProxy] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        for proxy in self._opened:
            self.run(proxy.close())
        self.run(_cancel_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def cutting(self, target: str) -> "CutProxy":
        return self._open(CutProxy(target))

    def tools(self, target: str, *, seed: int) -> "ToolProxy":
        return self._open(ToolProxy(target, seed))

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def _open(self, proxy: T) -> T:
        self.run(proxy.open())
        self._opened.append(proxy)
        return proxy


class CutProxy:
    """Forwards TCP connections to `target`; `cut` resets all open ones."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("http://").rpartition(":")
        self._target = (host, int(port))
        self._open_ends: set[asyncio.StreamWriter] = set()
        self.url = ""

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._cut()
        self._server.close()

    def cut_soon(self) -> None:
        """Cut the connections soon; may be called from any thread."""
        self._server.get_loop().call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for writer in self._open_ends:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open_ends.add(writer)
        try:
            there, back = await asyncio.open_connection(*self._target)
            self._open_ends.add(back)
            try:
                # When one side ends, so does the other: a reset is passed on.
                await asyncio.wait(
                    [asyncio.ensure_future(_copy(reader, back)), asyncio.ensure_future(_copy(there, writer))],
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                self._open_ends.discard(back)
                back.transport.abort()
        except OSError:
            pass  # the target is down
        finally:
            self._open_ends.discard(writer)
            writer.transport.abort()


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass


class ToolProxy:
    """Forwards calls to the tool service with a delay, which is 20 times as long for one call in 50."""

    def __init__(self, target: str, seed: int) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._failed: Counter[str] = Counter()
        self.failures_left = 0
        self.slow_left = 0
        self.url = ""

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/call", self._call)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _call(self, request: web.Request) -> web.Response:
        body = await request.json()
        call = str(body)
        if self.failures_left and self._failed[call] < FAILURES_A_CALL:
            self.failures_left -= 1
            self._failed[call] += 1
            return web.Response(status=500, text="oh")
        await asyncio.sleep(0.01 * (20 if self._random.random() < 0.02 else 1))
        if self.slow_left:
            self.slow_left -= 1
            await asyncio.sleep(4)
        if body["tool"] == "search":
            return web.json_response({"text": PAGE, "status": "ok", "seconds": 0.1, "cached": False})
        token = {"Authorization": request.headers["Authorization"]}
        try:
            async with self._session.post(f"{self._target}/call", json=body, headers=token) as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
        except aiohttp.ClientError:
            return web.Response(status=502)
