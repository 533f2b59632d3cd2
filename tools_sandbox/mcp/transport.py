"""The process of an MCP server, and the messages that it exchanges with the `mcp` library over stdio."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from tools_sandbox.config import McpServerConfig
from tools_sandbox.mcp.guard import guarded

log = logging.getLogger("tools_sandbox")

_LINE_BYTES = 16 << 20
"""Longest message of a server."""
_EXIT_S = 2.0
"""Seconds for a server to end after its standard input was closed."""
_GONE = (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError)

_Incoming = MemoryObjectSendStream[SessionMessage | Exception]
_Outgoing = MemoryObjectReceiveStream[SessionMessage]
_Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


def server_environment(config: McpServerConfig) -> dict[str, str]:
    """Return the environment variables of a server; those of `env_from` that are not set are left out."""
    inherited = {name: os.environ[name] for name in config.env_from if name in os.environ}
    return get_default_environment() | inherited | config.env


@asynccontextmanager
async def server_process(name: str, config: McpServerConfig, ended: asyncio.Event) -> AsyncIterator[_Streams]:
    """Run a server inside the block and yield the streams of its messages. Raises OSError if it cannot be started.

    The connection ends when the server closes a stream, or sends a message that is too long or cannot be parsed: no one
    knows which call such a message answers, so all calls in flight fail. `ended` is set then.
    """
    process = await asyncio.create_subprocess_exec(
        *guarded(config.command, *config.args),
        stdin=PIPE,
        stdout=PIPE,
        env=server_environment(config),
        limit=_LINE_BYTES,
        # A signal to the group of this process must not reach the guard, which would then end nothing.
        start_new_session=True,
    )
    incoming, messages = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    requests, outgoing = anyio.create_memory_object_stream[SessionMessage](0)

    async def transfer(work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            incoming.close()
            outgoing.close()
            ended.set()

    works = (_receive(name, process, incoming), _send(process, outgoing))
    transfers = [asyncio.create_task(transfer(work)) for work in works]
    try:
        yield messages, requests
    finally:
        for task in transfers:
            task.cancel()
        await asyncio.wait(transfers)
        await _end(process)


async def _receive(name: str, process: Process, incoming: _Incoming) -> None:
    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            # Other lines are not addressed to a client: some servers print log lines.
            if line.lstrip().startswith((b"{", b"[")):
                await incoming.send(SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False)))
    except _GONE:
        pass
    except ValueError as error:  # of the parser, or of `readline` for a line that is too long
        reason = " ".join(str(error).split())[:200]
        log.error("an MCP server wrote an invalid message", extra={"server": name, "reason": reason})


async def _send(process: Process, outgoing: _Outgoing) -> None:
    assert process.stdin is not None
    with suppress(*_GONE):
        async for message in outgoing:
            # As ASCII: a model's text may hold lone surrogates, which UTF-8 cannot represent.
            text = json.dumps(message.message.model_dump(by_alias=True, exclude_unset=True))
            process.stdin.write(text.encode("ascii") + b"\n")
            await process.stdin.drain()


async def _end(guard: Process) -> None:
    """Close the server's input and wait for its end. Then have the guard end what is left."""
    assert guard.stdin is not None
    guard.stdin.close()
    await _wait(guard)
    if guard.returncode is None:
        guard.terminate()
        await _wait(guard)


async def _wait(guard: Process) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_EXIT_S):
            await guard.wait()
