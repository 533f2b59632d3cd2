"""One call from arguments to answer: look up the tool, check, ask the cache, wait for a place, run, count."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import BaseModel

from tools_sandbox.answers import ToolAnswer, ToolResult
from tools_sandbox.catalog import build_tools, tools_by_name
from tools_sandbox.config import ConfigError, SandboxConfig
from tools_sandbox.python_tool.pool import SandboxBroken, SandboxFull
from tools_sandbox.python_tool.sessions import TRAJECTORY
from tools_sandbox.python_tool.tool import PythonTool
from tools_sandbox.service.cache import AnswerCache, cache_key
from tools_sandbox.service.deduplication import RequestDeduplicator, WorkCancelled
from tools_sandbox.service.descriptors import Budget
from tools_sandbox.service.metrics import Metrics
from tools_sandbox.service.scheduling import FairQueue, QueueFull
from tools_sandbox.tool import Tool, ToolBroken, check_arguments
from tools_sandbox.utils.temporary import TemporaryFolder
from tools_sandbox.workers.pool import WorkerPool

log = logging.getLogger("tools_sandbox")

_LONGEST_RETRY_AFTER_S = 30
_FAILED = "The {} tool failed; this is not the fault of the call."


class NoAnswer(RuntimeError):  # noqa: N818 - a state, not a mistake
    """The service has no answer, now; none for a model.

    reason: "queue_full" or "queue_time" (ask again in `retry_after_s`), "stopping" (ask elsewhere, or later),
    "deadline" (the caller's own time is over).
    """

    def __init__(self, reason: str, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    tool: str
    arguments: Mapping[str, Any]
    trajectory_id: str
    """Whose turn it is: places are given out fairly between trajectories."""
    timeout_s: float
    """Wall-clock seconds that the execution may take."""
    request_id: str = ""
    """The same for every retry of one call; empty: every request is a call of its own."""
    deadline: float = math.inf
    """When the caller stops waiting, in seconds of this process's monotonic clock."""

    def digest(self) -> str:
        """Equal for equal questions."""
        return cache_key(self.tool, self.trajectory_id, self.arguments)


class ToolService:
    """Everything behind the HTTP surface. Belongs to one event loop once it is started."""

    def __init__(self, config: SandboxConfig, budget: Budget) -> None:
        """Raises ConfigError, with nothing left running."""
        self._budget = budget
        self._index_folder: TemporaryFolder | None = None
        self._cache = AnswerCache(config.cache)
        try:
            self._config = self._with_index(config)
            self.tools = build_tools(self._config)
        except BaseException:
            self.close()
            raise
        self._workers = WorkerPool(self._config, [self._index_folder.path] if self._index_folder else [])
        self._queues: dict[str, FairQueue] = {}
        self._replays = RequestDeduplicator(config.replay_s, config.orphan_s)
        self._calls: set[asyncio.Task[ToolAnswer]] = set()
        self._answered: Counter[str] = Counter()
        self._started = list[Tool]()
        self._execution_s = dict[str, float]()
        """Moving average by tool."""
        self.state = "ok"
        """"ok", "draining" (finishes what it has), "stopping"."""
        self.metrics = Metrics()
        self._watch()

    def _with_index(self, config: SandboxConfig) -> SandboxConfig:
        """The configuration with a place for the search index, and the index in it."""
        if not config.search.sources:
            return config
        from tools_sandbox.search.index import ensure_index

        if config.search.index_path is None:
            try:
                self._index_folder = TemporaryFolder("tools_sandbox-index-")
            except OSError as error:
                raise ConfigError(
                    f"search.index_path: is not set, and there is no temporary folder: {error}"
                ) from error
            config = replace(config, search=replace(config.search, index_path=self._index_folder.path / "index"))
        ensure_index(config.search)
        return config

    async def start(self) -> None:
        """Start what runs the tools. Raises ConfigError or SandboxBroken; `stop` ends what was started."""
        if self._config.mcp:
            from tools_sandbox.mcp.tools import connect

            mcp_tools = await connect(self._config.mcp)
            self._started += mcp_tools
            self.tools = tools_by_name([*self.tools.values(), *mcp_tools])
        places = self._config.max_concurrency
        waiting = self._budget.waiting(len(self.tools), places, self._config.max_waiting)
        if waiting < self._config.max_waiting:
            log.warning("max_waiting: %d for each tool, for want of open files (ulimit -Hn)", waiting)
        for name, tool in self.tools.items():
            self._queues[name] = FairQueue(places, waiting)
            if not tool.in_worker and tool not in self._started:
                await tool.start()
                self._started.append(tool)
        if any(tool.in_worker for tool in self.tools.values()):
            await self._workers.start()
        log.info("tools: %s", ", ".join(sorted(self.tools)))

    async def call(self, call: Call) -> ToolAnswer:
        """Answer a call. NoAnswer; RequestIdReused. If the awaiting task is cancelled, so is the call, unless a retry
        with its request id comes within `orphan_s`."""
        if self.state != "ok":
            raise self._refused("stopping", f"the service is {self.state}")
        task = asyncio.create_task(self._once(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            answer = await task
        except (asyncio.CancelledError, WorkCancelled) as error:
            task.cancel()
            if self.state == "stopping":
                raise self._refused("stopping", "the service is shutting down") from error
            raise
        self._count(call, answer)
        return answer

    async def _once(self, call: Call) -> ToolAnswer:
        TRAJECTORY.set(call.trajectory_id)
        if not call.request_id:
            return await self._answer(call)
        return await self._replays.answer(call.request_id, call.digest(), lambda: self._answer(call))

    async def _answer(self, call: Call) -> ToolAnswer:
        tool = self.tools.get(call.tool)
        if tool is None:
            offered = ", ".join(sorted(self.tools))
            return ToolAnswer(f'There is no tool "{call.tool[:100]}" here. Tools: {offered}.', "refused", 0.0, False)
        try:
            checked = check_arguments(tool, call.arguments)
        except ToolBroken as error:
            log.error("tool broken", extra={"tool": tool.name, "reason": str(error)})
            return ToolAnswer(_FAILED.format(tool.name), "error", 0.0, False)
        if isinstance(checked, str):
            return ToolAnswer(checked, "error", 0.0, False)
        if not tool.cacheable:
            result, seconds = await self._execute(tool, checked, call)
            return ToolAnswer(result.text, result.status, seconds, cached=False)
        key = cache_key(tool.name, tool.fingerprint, _plain(checked))
        limit_s = min(call.timeout_s, self._config.limits.time_s, tool.max_time_s)
        try:
            return await self._cache.answer(
                key, lambda: self._execute(tool, checked, call), limit_s=limit_s, deadline=call.deadline
            )
        except TimeoutError as error:
            raise self._refused("deadline", f"an equal call of {tool.name} took longer than the deadline") from error

    async def _execute(self, tool: Tool, arguments: Any, call: Call) -> tuple[ToolResult, float]:
        """The result and its wall time in seconds, without the time that it waited for a place."""
        queue, asked = self._queues[tool.name], time.monotonic()
        wait_s = min(self._config.queue_s, call.deadline - asked)
        try:
            async with queue.place(call.trajectory_id, wait_s):
                began = time.monotonic()
                self.metrics.waiting.labels(tool.name).observe(began - asked)
                limit_s = min(call.timeout_s, call.deadline - began, self._config.limits.time_s)
                result = await self._run(tool, arguments, limit_s)
                seconds = time.monotonic() - began
        except QueueFull as error:
            raise self._refused("queue_full", f"too many calls wait for {tool.name}", tool) from error
        except TimeoutError as error:
            if time.monotonic() >= call.deadline:
                raise self._refused("deadline", f"no place for {tool.name} before the caller's deadline") from error
            raise self._refused("queue_time", f"no place for {tool.name} in {wait_s:g} s", tool) from error
        self.metrics.execution.labels(tool.name).observe(seconds)
        self._execution_s[tool.name] = 0.9 * self._execution_s.get(tool.name, seconds) + 0.1 * seconds
        return result, seconds

    async def _run(self, tool: Tool, arguments: Any, timeout_s: float) -> ToolResult:
        try:
            if tool.in_worker:
                values = _plain(arguments)
                return await self._workers.run(tool.name, values, timeout_s, repeatable=tool.repeatable)
            if tool.enforces_timeout:
                return ToolResult(*await tool.run(arguments, timeout_s))
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    return ToolResult(*await tool.run(arguments, timeout_s))
            except TimeoutError:
                if not limit.expired():
                    raise
                text = f"Time limit exceeded: {tool.name} did not finish within {timeout_s:g} s."
                return ToolResult("timeout", text)
        except SandboxFull as error:
            raise self._refused("queue_full", str(error), tool) from error
        except (SandboxBroken, ToolBroken) as error:
            log.error("tool broken", extra={"tool": tool.name, "reason": str(error)})
        except Exception:
            log.exception("tool failed", extra={"tool": tool.name})
        return ToolResult("error", _FAILED.format(tool.name))

    def _refused(self, reason: str, message: str, tool: Tool | None = None) -> NoAnswer:
        self.metrics.refusals.labels(reason).inc()
        if tool is None:
            return NoAnswer(reason, message)
        queue = self._queues[tool.name]
        seconds = queue.waiting * self._execution_s.get(tool.name, 1.0) / queue.places
        return NoAnswer(reason, message, min(max(math.ceil(seconds), 1), _LONGEST_RETRY_AFTER_S))

    def _count(self, call: Call, answer: ToolAnswer) -> None:
        name = call.tool if call.tool in self.tools else "unknown"
        self._answered[f"{name}.{answer.status}"] += 1
        self.metrics.answers.labels(name, answer.status).inc()
        if self._config.log.calls:
            fields = {"tool": name, "status": answer.status, "seconds": round(answer.seconds, 6)}
            ids = {"cached": answer.cached, "trajectory": call.trajectory_id, "request": call.request_id}
            log.info("call", extra=fields | ids)

    def _watch(self) -> None:
        watch, cache = self.metrics.watch, self._cache
        watch("running", "Executions now.", lambda: sum(queue.running for queue in self._queues.values()))
        watch("waiting", "Calls that wait for a place.", lambda: sum(queue.waiting for queue in self._queues.values()))
        watch("cache_entries", "Answers kept in memory.", lambda: len(cache))
        watch("cache_hits", "Answers from the cache since the start.", lambda: cache.counts.hits)
        watch(
            "cache_joined", "Calls that shared an equal call's execution since the start.", lambda: cache.counts.joined
        )
        watch("cache_misses", "Executions of cacheable calls since the start.", lambda: cache.counts.misses)
        watch("cache_file_errors", "Failures of the cache file since the start.", lambda: cache.counts.file_errors)
        watch("replayed", "Retries that executed nothing since the start.", lambda: self._replays.replayed)
        watch("workers", "Worker processes alive.", lambda: self._workers.alive)
        watch("worker_restarts", "Workers replaced since the start.", lambda: self._workers.restarts)

    def health(self) -> dict[str, object]:
        """Counts since the start, and what is going on now."""
        python = self.tools["python"]
        assert isinstance(python, PythonTool)
        return {
            "status": self.state,
            "running": sum(queue.running for queue in self._queues.values()),
            "waiting": sum(queue.waiting for queue in self._queues.values()),
            "answered": dict(self._answered),
            "cache": {
                **asdict(self._cache.counts),
                "hit_share": round(self._cache.counts.hit_share, 4),
                "entries": len(self._cache),
            },
            "replayed": self._replays.replayed,
            "workers": {"alive": self._workers.alive, "restarts": self._workers.restarts},
            "python": python.health,
            "isolation": python.isolation,
        }

    async def drain(self) -> None:
        """Take no more calls and wait, at most `drain_s`, until those in flight have been answered."""
        self.state = "draining"
        if self._calls:
            await asyncio.wait(list(self._calls), timeout=self._config.drain_s)

    async def stop(self) -> None:
        """End the calls in flight, whose callers are told to ask elsewhere, and what runs the tools."""
        self.state = "stopping"
        await self._replays.cancel()
        await self._cache.cancel()
        calls = list(self._calls)
        for task in calls:
            task.cancel()
        if calls:
            await asyncio.wait(calls)
        await self._workers.stop()
        for tool in self._started:
            await tool.stop()

    def close(self) -> None:
        """Give back files."""
        self._cache.close()
        if self._index_folder is not None:
            self._index_folder.remove()


def _plain(arguments: Any) -> dict[str, Any]:
    """Checked arguments as JSON values."""
    return arguments.model_dump(mode="json") if isinstance(arguments, BaseModel) else dict(arguments)
