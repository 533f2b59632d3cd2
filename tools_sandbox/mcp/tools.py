"""Tools of MCP servers (Model Context Protocol), through the client of the official `mcp` package.

A server has the service's rights and is not isolated, so the operator must trust it. Each server and its client have a
worker process of their own: a message that takes seconds to parse delays only calls of this server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import mcp
from mcp.types import CONNECTION_CLOSED, TextContent

from tools_sandbox.answers import ToolResult
from tools_sandbox.config import ConfigError, McpServerConfig
from tools_sandbox.mcp.transport import server_environment, server_process
from tools_sandbox.tool import Tool, ToolBroken

log = logging.getLogger("tools_sandbox")

_START_TIMEOUT_S = 60.0
_CONNECT_SHARE = 0.9
"""Share of a call's time limit in which its server must have connected."""


class ConnectError(RuntimeError):
    """A server did not start or did not speak the protocol; the text has the reason."""


class McpServer:
    """One server and its connection, which is opened again after either has ended. Belongs to one event loop."""

    def __init__(self, name: str, config: McpServerConfig) -> None:
        self.name = name
        self._config = config
        self._keeper: asyncio.Task[None] | None = None
        self._client: asyncio.Future[mcp.Client] | None = None
        self._ended = asyncio.Event()
        self._connecting = asyncio.Lock()
        self._mode = "auto"
        """How the library opens a connection: "auto" first asks whether the server knows the newest protocol, and waits
        ten seconds for an old server that ignores that. So it is asked once."""

    async def client(self) -> mcp.Client:
        """Return the connected client. Raises what connecting raised."""
        async with self._connecting:
            if self._client is None or self._keeper is None or self._ended.is_set():
                await self.stop()
                self._ended = asyncio.Event()
                self._client = asyncio.get_running_loop().create_future()
                # The library's task groups require that one task opens and closes the connection.
                self._keeper = asyncio.create_task(self._keep(self._client, self._ended))
            return await asyncio.shield(self._client)

    async def _keep(self, connected: asyncio.Future[mcp.Client], ended: asyncio.Event) -> None:
        try:
            opening = mcp.Client(server_process(self.name, self._config, ended), mode=self._mode)
            async with AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(_START_TIMEOUT_S):
                        client = await stack.enter_async_context(opening)
                except TimeoutError:
                    raise ConnectError(f"it did not connect within {_START_TIMEOUT_S:g} s") from None
                if client.session.initialize_result is not None:
                    self._mode = "legacy"
                connected.set_result(client)
                await ended.wait()
                log.warning("an MCP server ended", extra={"server": self.name})
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # includes the library's exception groups
            if not connected.done():
                connected.set_exception(ConnectError(_innermost(error)))
            else:
                log.warning("an MCP server ended", extra={"server": self.name, "reason": _innermost(error)})
        finally:
            ended.set()
            if not connected.done():
                connected.cancel()

    async def stop(self) -> None:
        """Disconnect from the server, which ends its process."""
        if self._keeper is not None:
            if not self._ended.is_set():  # else it is ending the process
                self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._keeper = None


class McpTool(Tool):
    """One tool of an MCP server."""

    # It is unknown whether a call may run twice.
    repeatable = False

    def __init__(self, server: McpServer, offered: mcp.Tool, config: McpServerConfig) -> None:
        self.name = offered.name
        self.description = offered.description or ""
        self.arguments: Mapping[str, Any] = offered.input_schema
        self.cacheable = config.cache
        self.fingerprint = f"mcp {server.name} {config}"
        self._server = server
        self._max_chars = config.max_chars

    async def stop(self) -> None:
        """Stop the server. The tools of one server share it; a second call does nothing."""
        await self._server.stop()

    async def run(self, arguments: Mapping[str, Any], timeout_s: float) -> ToolResult:
        """Return the text of the result, cut at `max_chars`. Other content is only named."""
        server = f"MCP server {self._server.name}"
        try:
            # Waiting for a server is no fault of the call: it must not end as the call's own time limit.
            async with asyncio.timeout(_CONNECT_SHARE * timeout_s):
                client = await self._server.client()
        except TimeoutError as error:  # nothing was sent
            raise ToolBroken(f"{server} does not connect") from error
        except ConnectError as error:
            raise ToolBroken(f"{server}: {error}", failure="lasting") from error
        try:
            result = await client.call_tool(self.name, dict(arguments), read_timeout_seconds=timeout_s + 1)
        except mcp.MCPError as error:
            if error.code != CONNECTION_CLOSED:  # an answer of the server, which is alive
                return ToolResult("error", self._cut(error.message))
            problem = f"{server}: the connection ended in the middle of a call"
            raise ToolBroken(problem, failure="lasting") from error  # its effects are unknown
        except TimeoutError as error:
            raise ToolBroken(f"{server} does not answer", failure="lasting") from error
        except Exception as error:  # the answer violates the protocol; other calls are not affected
            raise ToolBroken(f"{server}: {_innermost(error)}", failure="lasting") from error
        parts = [part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content]
        return ToolResult("error" if result.is_error else "ok", self._cut("\n".join(parts)))

    def _cut(self, text: str) -> str:
        limit = self._max_chars
        if len(text) <= limit:
            return text
        return f"{text[:limit]}\n[answer cut: {len(text)} characters in all, the first {limit} are shown]"


async def connect(servers: Mapping[str, McpServerConfig]) -> list[Tool]:
    """Start the servers and return their tools. Raises ConfigError if one does not start or lacks a named tool."""
    tools = list[Tool]()
    started = list[McpServer]()
    try:
        for name, config in servers.items():
            server = McpServer(name, config)
            started.append(server)
            tools += await _offered(server, config)
    except BaseException:
        for server in started:
            await server.stop()
        raise
    return tools


async def _offered(server: McpServer, config: McpServerConfig) -> list[Tool]:
    if unset := [variable for variable in config.env_from if variable not in os.environ]:
        raise ConfigError(f"mcp.{server.name}.env_from: the environment variable {unset[0]} is not set")
    path = server_environment(config).get("PATH")
    if shutil.which(config.command, path=path) is None:
        raise ConfigError(f"mcp.{server.name}: {config.command} does not start: there is no such program")
    try:
        offered = {tool.name: tool for tool in await _listed(await server.client())}
    except ConnectError as error:
        raise ConfigError(f"mcp.{server.name}: {config.command} does not start: {error}") from error
    except Exception as error:
        raise ConfigError(f"mcp.{server.name}: {config.command} does not start: {_innermost(error)}") from error
    wanted = list(offered) if config.tools is None else config.tools
    for name in wanted:
        if name not in offered:
            raise ConfigError(f'mcp.{server.name}.tools: it has no "{name}"; it offers: {", ".join(sorted(offered))}')
    return [McpTool(server, offered[name], config) for name in wanted]


async def _listed(client: mcp.Client) -> list[mcp.Tool]:
    """Return the tools of all pages of a server's list."""
    page = await client.list_tools()
    tools, cursors = list(page.tools), set[str]()
    while page.next_cursor and page.next_cursor not in cursors:  # a faulty server could repeat a page without end
        cursors.add(page.next_cursor)
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _innermost(error: BaseException) -> str:
    """Return one line about the cause inside a group of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, mcp.MCPError) and error.code == CONNECTION_CLOSED:
        return "its process has ended or has closed its output; the log has what it wrote"
    return " ".join(f"{type(error).__name__}: {error}".split())
