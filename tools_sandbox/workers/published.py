"""The description by which a worker process publishes its tools to the service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools_sandbox.tool import Tool


class PublishedTool(Tool):
    """A tool that only its worker process can create. The service checks its arguments and passes its calls on."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        """Take name, schema and properties from a result of `describe`."""
        self.name = description["name"]
        self.description = description["description"]
        self.arguments: Mapping[str, Any] = description["arguments"]
        self.cacheable = description["cacheable"]
        self.fingerprint = description["fingerprint"]
        self.repeatable = description["repeatable"]


def describe(tool: Tool) -> dict[str, Any]:
    """Return a tool's fields as JSON values."""
    return {
        "name": tool.name,
        "description": tool.description,
        "arguments": tool.schema(),
        "cacheable": tool.cacheable,
        "fingerprint": tool.fingerprint,
        "repeatable": tool.repeatable,
    }
