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
from mcp.types import (
    INVALID_REQUEST,
    PARSE_ERROR,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from tools_sandbox.config import McpServerConfig
from tools_sandbox.mcp.guard import guarded

log = logging.getLogger("tools_sandbox")

_LINE_BYTES = 16 << 20
"""Longest message of a server."""
_EXIT_S = 2.0
"""Seconds for a server to end after its standard input was closed."""
_UNREAD = (PARSE_ERROR, INVALID_REQUEST)
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

    pending = set[RequestId]()
    works = (_receive(name, process, incoming, pending), _send(process, outgoing, pending))
    transfers = [asyncio.create_task(transfer(work)) for work in works]
    try:
        yield messages, requests
    finally:
        for task in transfers:
            task.cancel()
        await asyncio.wait(transfers)
        await _end(process)


async def _receive(name: str, process: Process, incoming: _Incoming, pending: set[RequestId]) -> None:
    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            # Other lines are not addressed to a client: some servers print log lines.
            if line.lstrip().startswith((b"{", b"[")):
                await incoming.send(SessionMessage(_addressed(_parse(line), pending)))
    except _GONE:
        pass
    except (ValueError, RecursionError) as error:  # of the parser, or of `readline` for a line that is too long
        reason = " ".join(str(error).split())[:200]
        log.error("an MCP server wrote an invalid message", extra={"server": name, "reason": reason})


def _parse(line: bytes) -> JSONRPCMessage:
    """Return the message in a line, with `?` in place of lone surrogates, which the adapter does not accept."""
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValidationError:
        text = json.dumps(json.loads(line), ensure_ascii=False)
        return jsonrpc_message_adapter.validate_json(text.encode("utf-8", "replace"), by_name=False)


def _addressed(message: JSONRPCMessage, pending: set[RequestId]) -> JSONRPCMessage:
    """Return the message, and remove the request that it answers from those that are pending.

    JSON-RPC answers a request that the server cannot read with the id null. That is the only pending one, if there is
    one. Other errors with this id answer a notification.
    """
    if isinstance(message, JSONRPCError) and message.id is None and len(pending) == 1 and message.error.code in _UNREAD:
        message = message.model_copy(update={"id": next(iter(pending))})
    if isinstance(message, JSONRPCError | JSONRPCResponse) and message.id is not None:
        pending.discard(message.id)
    return message


async def _send(process: Process, outgoing: _Outgoing, pending: set[RequestId]) -> None:
    assert process.stdin is not None
    with suppress(*_GONE):
        async for message in outgoing:
            if isinstance(message.message, JSONRPCRequest):
                pending.add(message.message.id)
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
