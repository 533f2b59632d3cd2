"""The dispatch of a call: look up the tool, check the arguments, ask the cache, wait for a slot, run, count."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tools_sandbox.answers import ToolAnswer, ToolResult
from tools_sandbox.catalog import build_tools, tools_by_name
from tools_sandbox.config import ConfigError, ToolServiceConfig
from tools_sandbox.python_tool.pool import SandboxBroken, SandboxFull
from tools_sandbox.python_tool.sessions import TRAJECTORY
from tools_sandbox.python_tool.tool import PythonTool
from tools_sandbox.service.cache import AnswerCache, cache_key
from tools_sandbox.service.deduplication import RequestDeduplicator, WorkCancelled
from tools_sandbox.service.descriptors import Budget
from tools_sandbox.service.metrics import Metrics
from tools_sandbox.service.scheduling import FairQueue, QueueFull
from tools_sandbox.tool import Tool, ToolBroken, as_broken, broken_result, check_arguments
from tools_sandbox.utils.temporary import TemporaryFolder
from tools_sandbox.workers.pool import WorkerPool

log = logging.getLogger("tools_sandbox")

_MAX_RETRY_AFTER_S = 30


class NoAnswer(RuntimeError):  # noqa: N818 - a state, not a mistake
    """The service cannot answer now. This is not an answer for a model.

    reason: "queue_full" or "queue_time" (repeat the call in `retry_after_s`), "stopping" (repeat it elsewhere or
    later), "deadline" (the caller's deadline has passed).
    """

    def __init__(self, reason: str, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments, limits and identity of one call of a tool."""

    tool: str
    arguments: Mapping[str, Any]
    trajectory_id: str
    """Slots are shared fairly between trajectories."""
    timeout_s: float
    """Wall-clock limit of the execution in seconds."""
    request_id: str = ""
    """The same for every retry of one call. Empty: every request counts as a new call."""
    deadline: float = math.inf
    """Time at which the caller stops waiting, in seconds of this process's monotonic clock."""

    def digest(self) -> str:
        """Return a digest that is equal for calls with equal arguments."""
        return cache_key(self.tool, self.trajectory_id, self.arguments)


class ToolService:
    """The service without its HTTP interface. Belongs to one event loop once it is started."""

    def __init__(self, config: ToolServiceConfig, budget: Budget) -> None:
        """Build the tools. Raises ConfigError after releasing everything."""
        self._budget = budget
        self._index_folder: TemporaryFolder | None = None
        self._cache = AnswerCache(config.cache)
        try:
            self._config = self._with_index(config)
            self.tools = build_tools(self._config)
        except BaseException:
            self.close()
            raise
        remove: list[Path] = [self._index_folder.path] if self._index_folder else []
        self._workers = WorkerPool(replace(self._config, mcp={}), remove)
        self._mcp_pools: dict[str, WorkerPool] = {}
        """Pool of one worker by the name of a tool of its MCP server."""
        self._pools = [self._workers]
        """All of the above."""
        self._queues: dict[str, FairQueue] = {}
        self._requests = RequestDeduplicator(config.keep_answers_s, config.orphan_s)
        self._calls: set[asyncio.Task[ToolAnswer]] = set()
        self._answered: Counter[str] = Counter()
        self._started = list[Tool]()
        self._execution_s = dict[str, float]()
        """Moving average of the execution time in seconds, by tool."""
        self.state = "ok"
        """"ok", "draining" (finishes its calls and takes no more) or "stopping"."""
        self.metrics = Metrics()
        self._add_gauges()

    def _with_index(self, config: ToolServiceConfig) -> ToolServiceConfig:
        """Build the search index if needed. Return the configuration with the path of the index."""
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
        """Start the tools and workers. Raises ConfigError or SandboxBroken; `stop` ends everything that has started."""
        for name, server in self._config.mcp.items():
            pool = WorkerPool(ToolServiceConfig(mcp={name: server}, log=self._config.log, workers=1), [])
            self._pools.append(pool)
            await pool.start()
            self._mcp_pools |= {tool.name: pool for tool in pool.tools}
            self.tools = tools_by_name([*self.tools.values(), *pool.tools])
        slots = self._config.max_concurrency
        waiting = self._budget.max_waiting(len(self.tools), slots, self._config.max_waiting)
        if waiting < self._config.max_waiting:
            log.warning("max_waiting: only %d per tool, since the limit of open files is low (ulimit -Hn)", waiting)
        for name, tool in self.tools.items():
            self._queues[name] = FairQueue(self._config.slots(name), waiting)
            if not tool.in_worker:
                await tool.start()
                self._started.append(tool)
        if any(tool.in_worker and name not in self._mcp_pools for name, tool in self.tools.items()):
            await self._workers.start()
        log.info("tools: %s", ", ".join(sorted(self.tools)))

    async def call(self, call: Call) -> ToolAnswer:
        """Answer a call. Raises NoAnswer or RequestIdReused.

        If the awaiting task is cancelled, so is the call, unless a retry with its request id comes within `orphan_s`.
        """
        if self.state != "ok":
            raise self._no_answer("stopping", f"the service is {self.state}")
        task = asyncio.create_task(self._answer_once(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            answer = await task
        except (asyncio.CancelledError, WorkCancelled) as error:
            task.cancel()
            if self.state == "stopping":
                raise self._no_answer("stopping", "the service is shutting down") from error
            raise
        self._count(call, answer)
        return answer

    async def _answer_once(self, call: Call) -> ToolAnswer:
        TRAJECTORY.set(call.trajectory_id)
        if not call.request_id:
            return await self._answer(call)
        return await self._requests.answer(call.request_id, call.digest(), lambda: self._answer(call))

    async def _answer(self, call: Call) -> ToolAnswer:
        tool = self.tools.get(call.tool)
        if tool is None:
            offered = ", ".join(sorted(self.tools))
            return ToolAnswer(f'There is no tool "{call.tool[:100]}" here. Tools: {offered}.', "refused", 0.0, False)
        try:
            checked = check_arguments(tool, call.arguments)
        except ToolBroken as error:
            return ToolAnswer(_broken(tool, error).text, "error", 0.0, False, error.failure)
        if isinstance(checked, str):
            return ToolAnswer(checked, "error", 0.0, False)
        if not tool.cacheable:
            result, seconds = await self._execute(tool, checked, call)
            return ToolAnswer(result.text, result.status, seconds, cached=False, failure=result.failure)
        key = cache_key(tool.name, tool.fingerprint, _as_json(checked))
        limit_s = self._limit_s(tool, call)
        try:
            return await self._cache.answer(
                key, lambda: self._execute(tool, checked, call), limit_s=limit_s, deadline=call.deadline
            )
        except TimeoutError as error:
            raise self._no_answer("deadline", f"an equal call of {tool.name} took longer than the deadline") from error

    def _limit_s(self, tool: Tool, call: Call) -> float:
        """Return the longest wall time of the call's execution in seconds."""
        return min(call.timeout_s, self._config.limits.time_s, tool.max_time_s)

    async def _execute(self, tool: Tool, arguments: Any, call: Call) -> tuple[ToolResult, float]:
        """Return the result and its wall time in seconds, without queueing."""
        queue, queued_at = self._queues[tool.name], time.monotonic()
        wait_s = min(self._config.queue_s, call.deadline - queued_at)
        try:
            async with queue.slot(call.trajectory_id, wait_s):
                began = time.monotonic()
                self.metrics.waiting.labels(tool.name).observe(began - queued_at)
                own_s, left_s = self._limit_s(tool, call), call.deadline - began
                result = await self._run(tool, arguments, min(own_s, left_s))
                seconds = time.monotonic() - began
        except QueueFull as error:
            raise self._no_answer("queue_full", f"too many calls wait for {tool.name}", tool) from error
        except TimeoutError as error:
            if time.monotonic() >= call.deadline:
                raise self._no_answer("deadline", f"no slot for {tool.name} before the caller's deadline") from error
            raise self._no_answer("queue_time", f"no slot for {tool.name} in {wait_s:g} s", tool) from error
        if result.status == "timeout" and left_s < own_s:  # the wait before took its time: no result for a model
            late = f"{tool.name} did not end before the caller's deadline"
            if tool.repeatable:
                raise self._no_answer("deadline", late, tool)
            result = _broken(tool, ToolBroken(late, failure="lasting"))
        self.metrics.execution.labels(tool.name).observe(seconds)
        self._execution_s[tool.name] = 0.9 * self._execution_s.get(tool.name, seconds) + 0.1 * seconds
        return result, seconds

    async def _run(self, tool: Tool, arguments: Any, timeout_s: float) -> ToolResult:
        try:
            if tool.in_worker:
                pool = self._mcp_pools.get(tool.name, self._workers)
                return await pool.run(tool.name, _as_json(arguments), timeout_s, repeatable=tool.repeatable)
            if tool.enforces_timeout:
                return ToolResult(*await tool.run(arguments, timeout_s))
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    return ToolResult(*await tool.run(arguments, timeout_s))
            except TimeoutError:
                if not limit.expired():
                    raise
                text = f"{tool.name} did not finish within {timeout_s:g} s."
                if tool.remote:
                    raise ToolBroken(text) from None
                return ToolResult("timeout", f"Time limit exceeded: {text}")
        except SandboxFull as error:
            raise self._no_answer("queue_full", str(error), tool) from error
        except (SandboxBroken, ToolBroken) as error:
            return _broken(tool, error if isinstance(error, ToolBroken) else ToolBroken(str(error)))
        except Exception as error:
            log.exception("tool failed", extra={"tool": tool.name})
            return broken_result(tool.name, as_broken(tool, error))

    def _no_answer(self, reason: str, message: str, tool: Tool | None = None) -> NoAnswer:
        self.metrics.refusals.labels(reason).inc()
        if tool is None:
            return NoAnswer(reason, message)
        queue = self._queues[tool.name]
        seconds = queue.waiting * self._execution_s.get(tool.name, 1.0) / queue.slots
        return NoAnswer(reason, message, min(max(math.ceil(seconds), 1), _MAX_RETRY_AFTER_S))

    def _count(self, call: Call, answer: ToolAnswer) -> None:
        name = call.tool if call.tool in self.tools else "unknown"
        self._answered[f"{name}.{answer.status}"] += 1
        self.metrics.answers.labels(name, answer.status).inc()
        if self._config.log.calls:
            fields = {"tool": name, "status": answer.status, "seconds": round(answer.seconds, 6)}
            ids = {"cached": answer.cached, "trajectory": call.trajectory_id, "request": call.request_id}
            log.info("call", extra=fields | ids)

    def _add_gauges(self) -> None:
        watch, cache = self.metrics.watch, self._cache
        watch("running", "Executions now.", lambda: sum(queue.running for queue in self._queues.values()))
        watch("waiting", "Calls that wait for a slot.", lambda: sum(queue.waiting for queue in self._queues.values()))
        watch("cache_entries", "Answers kept in memory.", lambda: len(cache))
        watch("cache_hits", "Answers from the cache since the start.", lambda: cache.counts.hits)
        watch(
            "cache_joined", "Calls that shared an equal call's execution since the start.", lambda: cache.counts.joined
        )
        watch("cache_misses", "Executions of cacheable calls since the start.", lambda: cache.counts.misses)
        watch("cache_file_errors", "Failures of the cache file since the start.", lambda: cache.counts.file_errors)
        watch(
            "retries_answered",
            "Retries that executed nothing since the start.",
            lambda: self._requests.retries_answered,
        )
        watch("workers", "Worker processes alive.", self._workers_alive)
        watch("worker_restarts", "Workers replaced since the start.", self._worker_restarts)

    def _workers_alive(self) -> int:
        return sum(pool.alive for pool in self._pools)

    def _worker_restarts(self) -> int:
        return sum(pool.restarts for pool in self._pools)

    def health(self) -> dict[str, object]:
        """Return the state of the service and its counts since the start."""
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
            "retries_answered": self._requests.retries_answered,
            "workers": {"alive": self._workers_alive(), "restarts": self._worker_restarts()},
            "python": python.health,
            "isolation": python.isolation,
        }

    async def drain(self) -> None:
        """Take no more calls. Wait until those in flight are answered, but at most `drain_s` seconds."""
        self.state = "draining"
        if self._calls:
            await asyncio.wait(list(self._calls), timeout=self._config.drain_s)

    async def stop(self) -> None:
        """Cancel the calls in flight (their callers get 503), and stop workers and tools."""
        self.state = "stopping"
        await self._requests.cancel()
        await self._cache.cancel()
        calls = list(self._calls)
        for task in calls:
            task.cancel()
        if calls:
            await asyncio.wait(calls)
        await asyncio.gather(*(pool.stop() for pool in self._pools))
        for tool in self._started:
            await tool.stop()

    def close(self) -> None:
        """Close the cache and remove the temporary index."""
        self._cache.close()
        if self._index_folder is not None:
            self._index_folder.remove()


def _as_json(arguments: Any) -> dict[str, Any]:
    """Return checked arguments as JSON values."""
    return arguments.model_dump(mode="json") if isinstance(arguments, BaseModel) else dict(arguments)


def _broken(tool: Tool, error: ToolBroken) -> ToolResult:
    """Log why a tool is broken, and return the result of its call."""
    log.error("tool broken", extra={"tool": tool.name, "reason": str(error)})
    return broken_result(tool.name, error)
