"""A worker process, which runs search, browse and plug-in tools, or those of one MCP server, for its service.

These tools read hostile pages and run users' code. In a worker, a crash, a hang or a leak costs only the calls of that
process. A worker lives as long as its socket to the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import shutil
import socket
import sys
from typing import Any

from pydantic import TypeAdapter

from tools_sandbox.answers import ToolResult
from tools_sandbox.catalog import worker_tools
from tools_sandbox.config import ConfigError, ToolServiceConfig
from tools_sandbox.tool import Tool, ToolBroken, as_broken, broken_result, check_arguments
from tools_sandbox.utils import frames, logs
from tools_sandbox.workers.published import describe

log = logging.getLogger("tools_sandbox")

_MAX_STANDSTILL_S = 30.0
_STOP_S = 8.0
"""Seconds for all tools to stop. An MCP server needs up to four."""


async def run_tool(tool: Tool, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
    """Return the result; a tool that is broken or raises an error has one, too."""
    checked = check_arguments(tool, arguments)
    assert not isinstance(checked, str), checked  # the service has checked them already
    try:
        return ToolResult(*await tool.run(checked, timeout_s))
    except ToolBroken as error:
        log.error("tool broken", extra={"tool": tool.name, "reason": str(error)})
        return broken_result(tool.name, error)
    except Exception as error:
        log.exception("tool failed", extra={"tool": tool.name})
        return broken_result(tool.name, as_broken(tool, error))


async def _serve(control: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=control)
    first = await frames.receive(reader)
    if first is None:
        return
    config: ToolServiceConfig = TypeAdapter(ToolServiceConfig).validate_python(first["config"])
    logs.set_up(config.log.format)
    try:
        tools = {tool.name: tool for tool in [*worker_tools(config), *await _mcp_tools(config)]}
        for tool in tools.values():
            await tool.start()
    except ConfigError as error:
        writer.write(frames.encode({"error": str(error)}))
        await writer.drain()
        return
    writer.write(frames.encode({"tools": [describe(tool) for tool in tools.values()]}))
    running: dict[int, asyncio.Task[None]] = {}
    heartbeat = asyncio.create_task(_heartbeat())

    async def call(message: dict[str, Any]) -> None:
        number = message["id"]
        try:
            result = await run_tool(tools[message["tool"]], message["arguments"], message["timeout_s"])
            writer.write(frames.encode({"id": number, "result": result}))
        except asyncio.CancelledError:
            writer.write(frames.encode({"id": number, "result": None}))
        finally:
            del running[number]

    while (message := await frames.receive(reader)) is not None:
        if "cancel" in message:
            if message["cancel"] in running:
                running[message["cancel"]].cancel()
        else:
            running[message["id"]] = asyncio.create_task(call(message))
            await asyncio.sleep(0)  # the call begins: a task that is cancelled before that would never answer
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_S):
            for tool in tools.values():
                await tool.stop()
    heartbeat.cancel()
    # The service is gone, perhaps killed, so its folders are removed here.
    for folder in first["remove"]:
        shutil.rmtree(folder, ignore_errors=True)


async def _mcp_tools(config: ToolServiceConfig) -> list[Tool]:
    if not config.mcp:
        return []
    from tools_sandbox.mcp.tools import connect  # late: other workers do not need the library

    return await connect(config.mcp)


async def _heartbeat() -> None:
    """End this process if its event loop stalls: a C function that holds the GIL would outlive the service."""
    while True:
        faulthandler.dump_traceback_later(_MAX_STANDSTILL_S, exit=True)
        await asyncio.sleep(1)


def main() -> None:
    """Serve over the socket whose descriptor is the only argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(_serve(control))
    # Without waiting for threads: a hung thread must not keep a worker alive after its service.
    os._exit(0)


if __name__ == "__main__":
    main()
