"""Tools that crash, hang or fail, and one that does not, for the tests of workers."""

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
    """A tool that kills its worker and is not repeatable."""

    name = "abort_once"
    repeatable = False


class Hold(_Trouble):
    """A tool that holds the GIL, so that nothing in its process can end it. It makes the file `began` first."""

    name = "hold"

    def __init__(self, began: str = "") -> None:
        self._began = Path(began)

    async def run(self, arguments: Any, timeout_s: float) -> ToolResult:
        self._began.touch()
        re.match(r"(a|aa)+$", "a" * 60 + "b")
        return ToolResult("ok", "never")


SECONDS = {"type": "object", "properties": {"seconds": {"type": "number"}}, "required": ["seconds"]}


class Sleep(_Trouble):
    """A tool that waits, first for a file `until` if configured. It adds a line to the file `ran`."""

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


class SleepOnce(Sleep):
    """A sleep that may not run twice."""

    name = "sleep_once"
    repeatable = False


class Stuck(_Trouble):
    """A tool that blocks in a thread, which cannot be cancelled. It makes the file `began` first."""

    name = "stuck"

    def __init__(self, began: str = "") -> None:
        self._began = Path(began)

    def _block(self) -> None:
        self._began.touch()
        time.sleep(60)

    async def run(self, arguments: Any, timeout_s: float) -> ToolResult:
        await in_thread(self._block)
        return ToolResult("ok", "never")


class SlowStart(_Trouble):
    """A tool whose constructor waits until the file `held` is gone."""

    name = "slow_start"

    def __init__(self, held: str) -> None:
        while Path(held).exists():
            time.sleep(0.02)


class Raise(_Trouble):
    name = "raise"

    async def run(self, arguments: Any, timeout_s: float) -> ToolResult:
        raise KeyError("an inner matter")


class NoTool:
    """A class that is not a tool."""
