"""The pool of worker processes: it starts them, spreads calls over them, and replaces those that die or hang."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tools_sandbox.answers import ToolResult
from tools_sandbox.config import TOKEN_VARIABLE, ConfigError, ToolServiceConfig
from tools_sandbox.tool import Tool, ToolBroken
from tools_sandbox.utils import frames
from tools_sandbox.workers.published import PublishedTool

log = logging.getLogger("tools_sandbox")

_START_TIMEOUT_S = 120.0
_END_S = 10.0
"""Seconds for a worker to stop its tools and end, before it is killed."""
_CANCEL_GRACE_S = 3.0
"""Seconds for a worker to confirm that a cancelled call has ended. After that it counts as hung and is replaced."""
_KILL_TIMEOUT_S = 4.0
"""Seconds that the service waits for a killed worker, which the kernel may not end while it waits for a device."""
_MAX_PAUSE_S = 5.0


class _WorkerDied(Exception):  # noqa: N818 - a state
    """The worker of a call has died."""


@dataclass(slots=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pending: dict[int, asyncio.Future[ToolResult | None]] = field(default_factory=dict)

    def kill(self) -> None:
        """Kill the process and close its socket, which a process that is blocked in the kernel would keep open."""
        self.process.kill()
        self.writer.transport.abort()


class WorkerPool:
    """A pool of `config.workers` processes, which run the tools of a configuration. Belongs to one event loop.

    remove: folders that a worker removes when it finds that the service has died.
    """

    def __init__(self, config: ToolServiceConfig, remove: list[Path]) -> None:
        config_values = TypeAdapter(ToolServiceConfig).dump_python(config, mode="json")
        self._first = frames.encode({"config": config_values, "remove": [str(folder) for folder in remove]})
        self._wanted = config.workers
        self._workers: list[_Worker] = []
        self._changed = asyncio.Condition()
        """Notified when a worker has started, and when the pool stops."""
        self._numbers = itertools.count()
        self._background: set[asyncio.Task[None]] = set()
        self._starting: set[subprocess.Popen[bytes]] = set()
        """Processes that do not serve yet."""
        self._stopping = False
        self.restarts = 0
        self.tools: list[Tool] = []
        """Tools that the workers run, known after the start."""

    @property
    def alive(self) -> int:
        """Number of workers that take calls."""
        return len(self._workers)

    async def start(self) -> None:
        """Start all workers and wait until they serve. Raises ConfigError if a tool cannot start as configured."""
        await asyncio.gather(*(self._add_worker() for _ in range(self._wanted)))

    async def run(self, tool: str, arguments: Mapping[str, Any], timeout_s: float, *, repeatable: bool) -> ToolResult:
        """Run a call on the least busy worker. If it dies and the tool is `repeatable`, run the call once more.

        Raises ToolBroken if that one dies, too, if the call may not run twice, or if no worker starts in time. If the
        awaiting task is cancelled, so is the call.
        """
        deadline, tries = time.monotonic() + timeout_s, 2 if repeatable else 1
        while tries:
            tries -= 1
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    worker = await self._least_busy()
            except TimeoutError:
                raise ToolBroken(f"{tool}: no worker started within {timeout_s:g} s") from None
            left_s = deadline - time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    result = await self._run_on(worker, tool, arguments, left_s)
            except TimeoutError:
                return ToolResult("timeout", f"Time limit exceeded: {tool} did not finish within {timeout_s:g} s.")
            except _WorkerDied:
                continue
            if result is None:
                raise ToolBroken(f"{tool}: its worker cancelled the call")
            return result
        workers = "both of its workers" if repeatable else "its worker"
        raise ToolBroken(f"{tool}: {workers} died", failure="lasting")

    async def _least_busy(self) -> _Worker:
        async with self._changed:
            await self._changed.wait_for(lambda: self._workers or self._stopping)
        if self._stopping:
            raise ToolBroken("the service is shutting down")
        return min(self._workers, key=lambda worker: len(worker.pending))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _run_on(
        self, worker: _Worker, tool: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> ToolResult | None:
        number = next(self._numbers)
        future = worker.pending[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "tool": tool, "arguments": dict(arguments), "timeout_s": timeout_s}
        worker.writer.write(frames.encode(message))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._in_background(self._cancel(worker, number))
            raise

    async def _cancel(self, worker: _Worker, number: int) -> None:
        """End a call on its worker. If the call does not end, kill the worker."""
        future = worker.pending.get(number)
        if future is None:
            return
        worker.writer.write(frames.encode({"cancel": number}))
        await asyncio.wait([future], timeout=_CANCEL_GRACE_S)
        if future.done():
            future.exception()  # marks it as retrieved: no one waits for it any more
            return
        log.warning("a worker hangs in a call and is replaced", extra={"pid": worker.process.pid})
        del worker.pending[number]
        worker.kill()

    async def _add_worker(self) -> None:
        worker = await self._spawn()
        if self._stopping:
            await _end(worker.process, worker.writer)
            return
        self._workers.append(worker)
        self._in_background(self._listen(worker))
        await self._notify()

    async def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tools_sandbox.workers.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # In its own session: a Ctrl-C or a supervisor that kills the service's group reaches only the service.
                # Its workers end after it and remove its folders.
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE},
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        self._starting.add(process)
        try:
            writer.write(self._first)
            async with asyncio.timeout(_START_TIMEOUT_S):
                ready = await frames.receive(reader)
        except BaseException:
            await _end(process, writer)
            raise
        finally:
            self._starting.discard(process)
        if ready is None or "error" in ready:
            await _end(process, writer)
            raise ConfigError(ready["error"] if ready else "a worker ended at its start; see the log")
        self.tools = [PublishedTool(description) for description in ready["tools"]]
        return _Worker(process, reader, writer)

    async def _listen(self, worker: _Worker) -> None:
        while (message := await frames.receive(worker.reader)) is not None:
            future = worker.pending.pop(message["id"], None)
            if future is not None and not future.done():
                result = message["result"]
                future.set_result(None if result is None else ToolResult(*result))
        self._workers.remove(worker)
        for future in worker.pending.values():
            future.set_exception(_WorkerDied)
        worker.pending.clear()
        replaced = not self._stopping
        if replaced:  # first: the end of a process that is blocked in the kernel may take any time
            self._in_background(self._replace())
        await _end(worker.process, worker.writer)
        if replaced:
            log.warning("a worker died", extra={"pid": worker.process.pid, "code": worker.process.returncode})

    async def _replace(self) -> None:
        pause_s = 0.1
        while not self._stopping:
            self.restarts += 1
            try:
                await self._add_worker()
                break
            except (ConfigError, OSError) as error:  # may be temporary, e.g. a lack of memory or processes
                log.error("a worker cannot be started", extra={"reason": str(error)})
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _in_background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def stop(self) -> None:
        """Let all workers stop their tools and end. Kill those that take too long, and wait a bounded time for them."""
        self._stopping = True
        await self._notify()
        for process in self._starting:
            process.kill()
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.writer.write_eof()
        if self._background:
            await asyncio.wait(list(self._background), timeout=_END_S)
        for worker in self._workers:
            worker.kill()
        deadline = time.monotonic() + _CANCEL_GRACE_S + _KILL_TIMEOUT_S + 1
        while self._background and (left_s := deadline - time.monotonic()) > 0:
            await asyncio.wait(list(self._background), timeout=left_s)


async def _end(process: subprocess.Popen[bytes], writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    process.kill()
    # In a thread and bounded: a process that is blocked in the kernel may take any time to end.
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, _KILL_TIMEOUT_S)
