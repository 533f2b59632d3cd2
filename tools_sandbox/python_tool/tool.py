"""The python tool: its arguments, its settings, and its calls of the pool."""

from __future__ import annotations

import logging
import math
import sys
from typing import cast

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from tools_sandbox.answers import Status, ToolResult
from tools_sandbox.config import ConfigError, ToolServiceConfig
from tools_sandbox.python_tool.pool import PythonPool
from tools_sandbox.python_tool.sessions import SessionStore, run_in_session
from tools_sandbox.tool import Tool

log = logging.getLogger("tools_sandbox")


class PythonArguments(BaseModel):
    """Arguments of the python tool."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    code: str = Field(description="Python code; what it prints and the value of its last expression are the answer.")
    # Only for the caller: the schema that a model may see does not have them.
    state: SkipJsonSchema[str] = Field(default="", max_length=500, description="Name of the state to begin with.")
    keep: SkipJsonSchema[str] = Field(default="", max_length=500, description="Name under which to keep the state.")


class PythonTool(Tool):
    """The tool that runs code in a fresh, isolated process."""

    name = "python"
    description = "Run Python code in a fresh process and return what it prints, like a notebook cell."
    arguments = PythonArguments
    # The pool has its own processes.
    in_worker = False
    enforces_timeout = True

    def __init__(self, config: ToolServiceConfig) -> None:
        self.cacheable = config.python.cache
        self.max_time_s = config.python.timeout_s or math.inf
        self.fingerprint = f"{sys.version} {config.limits} {config.python.timeout_s}"
        self._code_chars = config.limits.code_chars
        folder = config.python.session_dir
        if folder is not None and config.python.cache:
            raise ConfigError("python.cache and python.session_dir exclude each other: a cached answer keeps no state")
        self._sessions = None if folder is None else SessionStore(folder, config.python.sessions_mib)
        self._wanted = config.python.isolation
        self._pool = PythonPool(config.python, config.limits)

    @property
    def isolation(self) -> str:
        """One line about the mechanisms that isolate a call from this machine."""
        return "" if self._pool.walls is None else self._pool.walls.describe()

    @property
    def health(self) -> dict[str, object]:
        """Whether the zygote is alive, and how many zygotes were replaced since the start."""
        return {"alive": self._pool.alive, "restarts": self._pool.restarts}

    async def start(self) -> None:
        """Start the zygote. Raises SandboxBroken if it cannot start as configured."""
        self._pool.start()
        self._log_isolation()

    def _log_isolation(self) -> None:
        walls = self._pool.walls
        assert walls is not None
        log.info("python isolation: level %s (at least %s is asked for)", walls.level().name.lower(), self._wanted)
        for line in walls.report():
            log.info("python isolation: %s", line)
        if warning := walls.warning():
            log.warning("python isolation: level %s: %s", walls.level().name.lower(), warning)

    async def stop(self) -> None:
        """End every running call and the zygote."""
        self._pool.close()

    async def run(self, arguments: PythonArguments, timeout_s: float) -> ToolResult:
        """Return the output of the code, or its traceback."""
        size = len(arguments.code)
        if size > self._code_chars:
            message = f'Argument "code" has {size} characters; at most {self._code_chars} are allowed.'
            return ToolResult("error", message)
        limit_s = min(timeout_s, self.max_time_s)
        outcome = await run_in_session(
            self._pool, self._sessions, arguments.code, limit_s, state=arguments.state, keep=arguments.keep
        )
        return ToolResult(cast(Status, outcome.status), outcome.text)
