"""The tool `browse` in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.tools_sandbox.helpers.hostile_site import PERMITTED
from tools_sandbox.answers import ToolResult
from tools_sandbox.browse.parser import PageParser
from tools_sandbox.browse.tool import BrowseArguments, BrowseTool
from tools_sandbox.config import BrowseConfig

ALLOW = (f"{PERMITTED}/32",)
Browse = Callable[..., ToolResult]


def browse_with(parser: PageParser) -> Browse:
    """Return a function that calls the tool in this process."""

    def call(url: str, timeout_s: float = 20.0, **config: Any) -> ToolResult:
        tool = BrowseTool(BrowseConfig(enabled=True, allow_networks=ALLOW, **config), parser)
        return asyncio.run(tool.run(BrowseArguments(url=url), timeout_s))

    return call
