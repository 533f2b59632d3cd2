"""One call from arguments to answer: look up the tool, check, ask the cache, wait for a place, run, count."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

from pydantic import BaseModel

from tools_sandbox.answers import ToolAnswer
from tools_sandbox.cache import AnswerCache, cache_key
from tools_sandbox.config import SandboxConfig
from tools_sandbox.python_tool.pool import SandboxBroken
from tools_sandbox.tools import PythonTool, Tool, build_tools, check_arguments

log = logging.getLogger("tools_sandbox")


class Overloaded(RuntimeError):  # noqa: N818 - a state, not a mistake
    """No free place within `queue_s`, or the service is shutting down: worth asking again, no answer for a model."""


class ToolService:
    """Everything behind the HTTP surface. Belongs to one event loop once calls are made."""

    def __init__(self, config: SandboxConfig) -> None:
        """Raises ConfigError or SandboxBroken, with nothing left running."""
        self._config = config
        self._cache = AnswerCache(config.cache)
        try:
            self.tools = build_tools(config)
        except BaseException:
            self._cache.close()
            raise
        # One each, so that slow code cannot hold up searches.
        self._places = {name: asyncio.Semaphore(config.max_concurrency) for name in self.tools}
        self._answered: Counter[str] = Counter()
        self._running = self._waiting = 0
        self._calls: set[asyncio.Task[ToolAnswer]] = set()
        self._stopping = False

    async def call(
        self, tool_name: str, arguments: Mapping[str, object], trajectory_id: str, timeout_s: float
    ) -> ToolAnswer:
        """Answer a call. Overloaded: there is no answer, now."""
        if self._stopping:
            raise Overloaded("the service is shutting down")
        task = asyncio.create_task(self._call(tool_name, arguments, timeout_s))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            answer = await task
        except asyncio.CancelledError as error:
            if self._stopping:
                raise Overloaded("the service is shutting down") from error
            raise
        self._answered[f"{tool_name if tool_name in self.tools else 'unknown'}.{answer.status}"] += 1
        if answer.status != "ok":
            log.debug("%s: %s %s: %.200s", trajectory_id, tool_name, answer.status, answer.text)
        return answer

    async def _call(self, tool_name: str, arguments: Mapping[str, object], timeout_s: float) -> ToolAnswer:
        tool = self.tools.get(tool_name)
        if tool is None:
            offered = ", ".join(sorted(self.tools))
            return ToolAnswer(f'There is no tool "{tool_name[:100]}" here. Tools: {offered}.', "refused", 0.0, False)
        checked = check_arguments(tool, arguments)
        if isinstance(checked, ToolAnswer):
            return checked
        if not tool.cacheable:
            return await self._execute(tool, checked, timeout_s)
        key = cache_key(tool_name, tool.fingerprint, checked.model_dump())
        return await self._cache.answer(key, lambda: self._execute(tool, checked, timeout_s))

    async def _execute(self, tool: Tool, arguments: BaseModel, timeout_s: float) -> ToolAnswer:
        places = self._places[tool.name]
        self._waiting += 1
        try:
            async with asyncio.timeout(self._config.queue_s):
                await places.acquire()
        except TimeoutError as error:
            raise Overloaded(f"no free place for {tool.name} within {self._config.queue_s:g} s") from error
        finally:
            self._waiting -= 1
        self._running += 1
        began = time.monotonic()
        try:
            status, text = await tool.run(arguments, timeout_s)
        except SandboxBroken as error:
            log.error("%s: %s", tool.name, error)
            status, text = "error", f"The {tool.name} tool failed; this is not the fault of the call."
        finally:
            self._running -= 1
            places.release()
        return ToolAnswer(text, status, time.monotonic() - began, cached=False)

    def health(self) -> dict[str, object]:
        """Counts since the start, and what is going on now."""
        python = self.tools.get("python")
        return {
            "status": "stopping" if self._stopping else "ok",
            "running": self._running,
            "waiting": self._waiting,
            "answered": dict(self._answered),
            "cache": {**asdict(self._cache.counts), "entries": len(self._cache)},
            "isolation": python.isolation if isinstance(python, PythonTool) else "",
        }

    def stop(self) -> None:
        """Take no more calls and end those in flight; their callers are told to ask elsewhere."""
        self._stopping = True
        for task in self._calls:
            task.cancel()

    def close(self) -> None:
        """Give back processes and files."""
        for tool in self.tools.values():
            tool.close()
        self._cache.close()
