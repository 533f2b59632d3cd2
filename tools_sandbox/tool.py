"""The tools: what each is called, which arguments it takes, and how it answers."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.json_schema import SkipJsonSchema

from tools_sandbox.answers import Status, ToolResult
from tools_sandbox.config import ConfigError, PluginConfig, SandboxConfig
from tools_sandbox.python_tool.pool import PythonPool
from tools_sandbox.python_tool.sessions import SessionStore, run_in_session

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = ThreadPoolExecutor(min(32, (os.cpu_count() or 1) + 4), "tool")
"""Of `in_thread` alone: what else blocks in this process (the resolver, say) takes none of them."""

ENTRY_POINTS = "tools_sandbox.tool"
"""Group of the entry points under which packages offer tools."""


class ToolBroken(RuntimeError):  # noqa: N818 - a state
    """A tool failed for reasons that are not the call's; never cached, told to the model without details."""


class Tool:
    """One tool. To add yours: subclass, say name, description and arguments, write `run`.

    Two processes make an object of it: the service, to know and publish it, and (with `in_worker`) each worker, to
    run it. So `__init__` is cheap, and `start` does what costs.
    """

    name: str
    """What the model calls it by."""
    description: str
    """One sentence for the model."""
    arguments: type[BaseModel] | Mapping[str, Any]
    """Its arguments: a pydantic model, or a JSON schema. Checked before `run` sees them."""
    cacheable: bool = False
    """True if equal arguments give equal answers, so that one execution serves all."""
    fingerprint: str = ""
    """Everything but the arguments that an answer depends on."""
    repeatable: bool = True
    """True if a call may run again after the process that ran it has died."""
    in_worker: bool = True
    """Run in a worker process. False: in the service's event loop, which nothing may block."""
    keeps_time: ClassVar[bool] = False
    """True if `run` itself answers "timeout" in time; otherwise it is cancelled."""
    longest_s: float = math.inf
    """Seconds after which `run` answers "timeout" also to a caller who allows more."""

    async def start(self) -> None:
        """Called once before the first `run`, in the process that runs it. ConfigError: it cannot work as told."""

    async def stop(self) -> None:
        """Called at the end, if the tool runs in the service."""

    async def run(self, arguments: Any, timeout_s: float) -> ToolResult:
        """Do the work. A failure that the model should read is an "error", not an exception.

        arguments: an instance of the pydantic model, or a mapping. timeout_s: wall-clock seconds until it is
        cancelled; blocking work goes through `in_thread`.
        """
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return dict(self.arguments) if isinstance(self.arguments, Mapping) else self.arguments.model_json_schema()


async def in_thread(work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Run blocking work in a thread, and do not return before it ends, not even when cancelled.

    So a call counts as ended when its work has; the service replaces a worker whose work ignores its time limit.
    Work that no thread has begun is not begun any more.
    """
    job = _THREADS.submit(partial(work, *arguments, **keywords))
    future = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not job.cancel():
            await asyncio.wait([future])
        raise


class PythonArguments(BaseModel):
    """Arguments of the python tool."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    code: str = Field(description="Python code; what it prints and the value of its last expression are the answer.")
    # For the caller alone: they are not in the schema that a model may be shown.
    state: SkipJsonSchema[str] = Field(default="", max_length=500, description="Name of the state to begin with.")
    keep: SkipJsonSchema[str] = Field(default="", max_length=500, description="Name under which to keep the state.")


class PythonTool(Tool):
    """Runs code in a fresh, isolated process."""

    name = "python"
    description = "Run Python code in a fresh process and return what it prints, like a notebook cell."
    arguments = PythonArguments
    # The pool's own processes run the code.
    in_worker = False
    keeps_time = True

    def __init__(self, config: SandboxConfig) -> None:
        self.cacheable = config.python.cache
        self.fingerprint = f"{sys.version} {config.limits}"
        self._code_chars = config.limits.code_chars
        folder = config.python.session_dir
        if folder is not None and config.python.cache:
            raise ConfigError("python.cache and python.session_dir exclude each other: a cached answer keeps no state")
        self._sessions = None if folder is None else SessionStore(folder, config.python.sessions_mb)
        self._pool = PythonPool(config.python, config.limits)

    @property
    def isolation(self) -> str:
        """What separates a call from this machine, in words."""
        return "" if self._pool.walls is None else self._pool.walls.describe()

    @property
    def health(self) -> dict[str, object]:
        """Whether there is a process that calls are forked from, and how many were replaced since the start."""
        return {"alive": self._pool.alive, "restarts": self._pool.restarts}

    async def start(self) -> None:
        """Start the process that calls are forked from. SandboxBroken: it cannot start as configured."""
        self._pool.start()

    async def stop(self) -> None:
        """End every running call."""
        self._pool.close()

    async def run(self, arguments: PythonArguments, timeout_s: float) -> ToolResult:
        """The code's output; its traceback on failure."""
        if len(arguments.code) > self._code_chars:
            size = len(arguments.code)
            return ToolResult(
                "error", f'Argument "code" has {size} characters; at most {self._code_chars} are allowed.'
            )
        outcome = await run_in_session(
            self._pool, self._sessions, arguments.code, timeout_s, state=arguments.state, keep=arguments.keep
        )
        return ToolResult(cast(Status, outcome.status), outcome.text)


def plugin_tools(plugins: tuple[PluginConfig, ...]) -> list[Tool]:
    """The tools of installed packages. ConfigError: there is none of that name, or it cannot be loaded."""
    return [_plugin(plugin) for plugin in plugins]


def _plugin(plugin: PluginConfig) -> Tool:
    offered = {entry.name: entry for entry in metadata.entry_points(group=ENTRY_POINTS)}
    if plugin.name not in offered:
        known = ", ".join(sorted(offered)) or "none"
        raise ConfigError(
            f'plugins: no installed package offers "{plugin.name}" in {ENTRY_POINTS} (installed: {known})'
        )
    try:
        tool = offered[plugin.name].load()(**plugin.options)
    except Exception as error:
        raise ConfigError(f'plugins: "{plugin.name}" cannot be made: {type(error).__name__}: {error}') from error
    if not isinstance(tool, Tool):
        raise ConfigError(f'plugins: "{plugin.name}" is no tools_sandbox.tool.Tool')
    return tool


def worker_tools(config: SandboxConfig) -> list[Tool]:
    """The tools that workers run."""
    return [tool for tool in _all_but_python(config) if tool.in_worker]


def build_tools(config: SandboxConfig) -> dict[str, Tool]:
    """All tools of a configuration but those of MCP servers, which say what they are when they run. ConfigError."""
    tools = [*_all_but_python(config), PythonTool(config)]
    return by_name(tools)


def by_name(tools: list[Tool]) -> dict[str, Tool]:
    """ConfigError: two have one name, or the schema of one is none."""
    for tool in tools:
        if isinstance(tool.arguments, Mapping):
            _check_own_schema(tool.name, tool.arguments)
    named = {tool.name: tool for tool in tools}
    twice = [tool.name for tool in tools if named[tool.name] is not tool]
    if twice:
        raise ConfigError(f'two tools are called "{twice[0]}"')
    return named


def _check_own_schema(name: str, schema: Mapping[str, Any]) -> None:
    import jsonschema

    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = ".".join(map(str, error.absolute_path)) or "top level"
        said = " ".join(error.message.split())[:200]
        raise ConfigError(
            f'the arguments of tool "{name}" are no JSON schema: {where}: {said}; mend it, or leave the tool out'
        ) from error


def _all_but_python(config: SandboxConfig) -> list[Tool]:
    # Late: a service without search or browse has no use for what they load.
    tools: list[Tool] = []
    if config.search.sources or config.search.engine != "local":
        from tools_sandbox.search.tool import SearchTool

        tools.append(SearchTool(config.search))
    if config.browse.enabled:
        from tools_sandbox.browse.tool import BrowseTool

        tools.append(BrowseTool(config.browse))
    return [*tools, *plugin_tools(config.plugins)]


def check_arguments(tool: Tool, arguments: Mapping[str, object]) -> Any | str:
    """The checked arguments, or words for the model that name what is wrong with them.

    ToolBroken: the tool's schema cannot be applied.
    """
    if isinstance(tool.arguments, Mapping):
        return _check_schema(tool, tool.arguments, arguments)
    try:
        return tool.arguments.model_validate(arguments)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        said = "; ".join(f'argument "{".".join(map(str, p["loc"]))}": {p["msg"]}' for p in problems)
        return _bad_arguments(tool, said, list(tool.schema()["properties"]))


def _check_schema(tool: Tool, schema: Mapping[str, Any], arguments: Mapping[str, object]) -> Any | str:
    import jsonschema
    from referencing import Registry

    # An empty registry: a schema's references are looked up nowhere else.
    validator = jsonschema.Draft202012Validator(schema, registry=Registry())
    try:
        problems = [
            f'argument "{".".join(map(str, problem.absolute_path)) or "*"}": {problem.message}'
            for problem in validator.iter_errors(dict(arguments))
        ]
    except Exception as error:  # a reference to nothing or to itself, a pattern that is none
        raise ToolBroken(f"{tool.name}: its schema cannot be applied: {type(error).__name__}: {error}") from error
    return _bad_arguments(tool, "; ".join(problems), list(schema.get("properties", {}))) if problems else arguments


def _bad_arguments(tool: Tool, said: str, known: list[str]) -> str:
    return f'Bad arguments for tool "{tool.name}": {said}. It takes: {", ".join(known)}.'
