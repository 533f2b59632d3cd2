"""The interface of a tool: the base class, its failure, the check of its arguments, and a helper for blocking work."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, ParamSpec, TypeVar

from pydantic import BaseModel, ValidationError

from tools_sandbox.answers import Failure, ToolResult

P = ParamSpec("P")
T = TypeVar("T")

_MAX_ARGUMENTS = 1000
_THREADS = ThreadPoolExecutor(min(32, (os.cpu_count() or 1) + 4), "tool")
"""Threads of `in_thread` only: other blocking work of the process, such as name resolution, cannot exhaust them."""


_HTTP_CLIENTS = {"aiohttp", "httpx", "httpcore"}
"""Packages whose errors are failures of a network, though not all are an OSError (those of requests are)."""


class ToolBroken(RuntimeError):  # noqa: N818 - a state
    """A service, the network or a provider failed; the call is not the cause. The failure is never cached.

    A tool raises it. Any other exception of a tool's code counts as one (`as_broken`).

    failure: see `answers.Failure`. blocked: why, for the operator; the answer of a blocked call has it.
    """

    def __init__(self, message: str, *, failure: Failure = "temporary", blocked: str = "") -> None:
        super().__init__(message)
        self.failure: Failure = "blocked" if blocked else failure
        self.blocked = blocked


def broken_result(tool: str, error: ToolBroken) -> ToolResult:
    """Return the result of a call that failed."""
    text = f"The {tool} tool failed; this is not the fault of the call."
    if error.blocked:
        text = f"The {tool} tool is blocked: {error.blocked}."
    return ToolResult("error", text, failure=error.failure)


class Tool:
    """One tool. To add one, subclass it, set `name`, `description` and `arguments`, and write `run`.

    The service makes one object to publish the tool. With `in_worker`, each worker makes another one to run it.
    `__init__` should therefore be cheap; put expensive set-up into `start`.
    """

    name: str
    """Name that the model calls it by."""
    description: str
    """One sentence for the model."""
    arguments: type[BaseModel] | Mapping[str, Any]
    """Pydantic model or JSON schema of the arguments. They are checked before `run` is called."""
    cacheable: bool = False
    """True if equal arguments give equal answers. One execution then serves all equal calls."""
    fingerprint: str = ""
    """Everything other than the arguments that the answer depends on. Part of the cache key."""
    repeatable: bool = True
    """True if a call may run again after its process has died."""
    in_worker: bool = True
    """Run in a worker process. False: run in the service's event loop, which must never block."""
    remote: bool = False
    """The tool only waits for another service: if its time is over, that service has failed and not the call."""
    enforces_timeout: ClassVar[bool] = False
    """True if `run` itself answers "timeout" in time. Otherwise the service cancels it."""
    max_time_s: float = math.inf
    """Seconds after which `run` answers "timeout" even if the caller allows more."""

    async def start(self) -> None:
        """Prepare the first `run`. Called once, in the process that runs the tool.

        Raises ConfigError if the tool cannot work as configured.
        """

    async def stop(self) -> None:
        """Release resources. Called at the end, in the process that runs the tool, if it is not killed."""

    async def run(self, arguments: Any, timeout_s: float) -> ToolResult:
        """Execute one call. Return a failure that the model should read as an "error"; do not raise it.

        Raise ToolBroken if a service, the network or a provider has failed: the trainer repeats the call, then drops
        the branch.

        arguments: an instance of the pydantic model, or a mapping if `arguments` is a JSON schema.
        timeout_s: wall-clock seconds until the call is cancelled. Run blocking work through `in_thread`.
        """
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments."""
        return dict(self.arguments) if isinstance(self.arguments, Mapping) else self.arguments.model_json_schema()


def as_broken(tool: Tool, error: Exception) -> ToolBroken:
    """Return the failure of a call whose tool raised another error than ToolBroken.

    Errors of the operating system and of HTTP clients are temporary if the call may run again. Others are mistakes in
    the tool's code, which a repetition would meet again.
    """
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    outside = isinstance(error, OSError) or not packages.isdisjoint(_HTTP_CLIENTS)
    failure: Failure = "temporary" if outside and tool.repeatable else "lasting"
    return ToolBroken(f"{type(error).__name__}: {error}", failure=failure)


async def in_thread(work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Run blocking work in a thread and return its result. Return only after the work has ended, even if cancelled.

    A call therefore ends with its work. If the work ignores its time limit, the service replaces the worker.
    Work that is still queued when the caller is cancelled never starts.
    """
    job = _THREADS.submit(partial(work, *arguments, **keywords))
    future = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not job.cancel():
            await asyncio.wait([future])
        raise


def check_arguments(tool: Tool, arguments: Mapping[str, object]) -> Any | str:
    """Return the checked arguments, or a message for the model that names what is wrong with them.

    Raises ToolBroken if the tool's schema cannot be applied.
    """
    if len(arguments) > _MAX_ARGUMENTS:  # each unknown one would be an error of its own
        return _bad_arguments(tool, f"more than {_MAX_ARGUMENTS} arguments", list(tool.schema().get("properties", {})))
    if isinstance(tool.arguments, Mapping):
        return _check_against_schema(tool, tool.arguments, arguments)
    try:
        return tool.arguments.model_validate(arguments)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        message = "; ".join(f'argument "{".".join(map(str, p["loc"]))}": {p["msg"]}' for p in problems)
        return _bad_arguments(tool, message, list(tool.schema()["properties"]))


def _check_against_schema(tool: Tool, schema: Mapping[str, Any], arguments: Mapping[str, object]) -> Any | str:
    import jsonschema
    from referencing import Registry

    # The empty registry keeps references from being looked up outside the schema.
    validator = jsonschema.Draft202012Validator(schema, registry=Registry())
    try:
        problems = [
            f'argument "{".".join(map(str, problem.absolute_path)) or "*"}": {problem.message}'
            for problem in validator.iter_errors(dict(arguments))
        ]
    except Exception as error:  # an unresolvable or circular reference, an invalid pattern
        raise ToolBroken(
            f"{tool.name}: its schema cannot be applied: {type(error).__name__}: {error}", failure="lasting"
        ) from error
    return _bad_arguments(tool, "; ".join(problems), list(schema.get("properties", {}))) if problems else arguments


def _bad_arguments(tool: Tool, message: str, known: list[str]) -> str:
    return f'Bad arguments for tool "{tool.name}": {message}. It takes: {", ".join(known)}.'
