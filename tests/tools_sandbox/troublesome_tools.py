"""Tools that crash, hang and fail, for the tests of the processes that run them; and one that does not."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any

from tools_sandbox.answers import ToolResult
from tools_sandbox.tool import Tool, in_thread

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class _Trouble(Tool):
    description = "for tests"
    arguments: Any = NO_ARGUMENTS


class Abort(_Trouble):
    name = "abort"

    async def run(self, arguments: Any, timeout_s: float) -> ToolResult:
        os.abort()


class AbortOnce(Abort):
    """Dies with its process, and may not run again."""

    name = "abort_once"
    repeatable = False


class Hold(_Trouble):
    """Holds the interpreter: no other thread of its process runs, and nothing in it can end it."""

    name = "hold"

    async def run(self, arguments: Any, timeout_s: float) -> ToolResult:
        re.match(r"(a|aa)+$", "a" * 60 + "b")
        return ToolResult("ok", "never")


SECONDS = {"type": "object", "properties": {"seconds": {"type": "number"}}, "required": ["seconds"]}


class Sleep(_Trouble):
    """Waits, if so configured until a file is there first; says by a line in a file that it ran."""

    name = "sleep"
    arguments = SECONDS

    def __init__(self, ran: str = "", until: str = "") -> None:
        self._ran, self._until = ran, until

    async def run(self, arguments: Any, timeout_s: float) -> ToolResult:
        if self._ran:
            with Path(self._ran).open("a") as file:
                file.write(f"{os.getpid()}\n")
        while self._until and not Path(self._until).exists():
            await asyncio.sleep(0.02)
        await asyncio.sleep(arguments["seconds"])
        return ToolResult("ok", f"slept {arguments['seconds']}")


class Stuck(_Trouble):
    """Blocks in a thread that heeds no cancelling."""

    name = "stuck"

    async def run(self, arguments: Any, timeout_s: float) -> ToolResult:
        await in_thread(time.sleep, 60)
        return ToolResult("ok", "never")


class SlowStart(_Trouble):
    """Is not made while the file is there."""

    name = "slow_start"

    def __init__(self, held: str) -> None:
        while Path(held).exists():
            time.sleep(0.02)


class Raise(_Trouble):
    name = "raise"

    async def run(self, arguments: Any, timeout_s: float) -> ToolResult:
        raise KeyError("an inner matter")


class NoTool:
    """Not what the entry point promises."""
