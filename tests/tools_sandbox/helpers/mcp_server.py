"""An MCP server on stdio, for the tests of the client."""

import os
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("arithmetic")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def reverse(text: str) -> str:
    """Reverse a text."""
    return text[::-1]


@server.tool()
def fail() -> str:
    """Raise."""
    raise ToolError("as asked")


@server.tool()
def end() -> str:
    """End this server during a call."""
    os._exit(1)


@server.tool()
def wait(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


@server.tool()
def environment() -> str:
    """Return the names of this server's environment variables."""
    return " ".join(sorted(os.environ))


if __name__ == "__main__":
    server.run()
