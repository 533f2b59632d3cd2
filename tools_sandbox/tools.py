"""The tools: what each is called, which arguments it takes, and how it answers."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tools_sandbox.answers import Status, ToolAnswer
from tools_sandbox.config import ConfigError, SandboxConfig
from tools_sandbox.python_tool.pool import PythonPool
from tools_sandbox.python_tool.sessions import SessionStore, run_in_session

log = logging.getLogger("tools_sandbox")


class Tool(Protocol):
    """One tool. Its arguments are checked before it sees them."""

    name: str
    description: str

    @property
    def arguments(self) -> type[BaseModel]:
        """The model of its arguments; its JSON schema is published under /tools."""

    cacheable: bool
    """True if equal arguments give equal answers, so that one execution serves all."""
    fingerprint: str
    """Everything but the arguments that an answer depends on."""

    async def run(self, arguments: Any, timeout_s: float) -> tuple[Status, str]:
        """Do the work. A failure that the model should read is an "error", not an exception."""

    def close(self) -> None:
        """Give back processes and files."""


class PythonArguments(BaseModel):
    """Arguments of the python tool."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    code: str = Field(description="Python code; what it prints and the value of its last expression are the answer.")
    state: str = Field(default="", max_length=500, description="For the caller: name of the state to begin with.")
    keep: str = Field(default="", max_length=500, description="For the caller: name under which to keep the state.")


class SearchArguments(BaseModel):
    """Arguments of the search tool."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    query: str = Field(description="What to look for, in words.")
    k: int | None = Field(default=None, ge=1, description="Most results wanted; none: as many as the service gives.")


class PythonTool:
    """Runs code in a fresh, isolated process."""

    name = "python"
    description = "Run Python code in a fresh process and return what it prints, like a notebook cell."
    arguments = PythonArguments

    def __init__(self, config: SandboxConfig) -> None:
        self.cacheable = config.python.cache
        self.fingerprint = f"{sys.version} {config.limits}"
        self._code_chars = config.limits.code_chars
        folder = config.python.session_dir
        if folder is not None and config.python.cache:
            raise ConfigError("python.cache and python.session_dir exclude each other: a cached answer keeps no state")
        self._sessions = None if folder is None else SessionStore(folder, config.python.sessions_mb)
        self._pool = PythonPool(config.python, config.limits)
        self._pool.start()

    @property
    def isolation(self) -> str:
        """What separates a call from this machine, in words."""
        return "" if self._pool.walls is None else self._pool.walls.describe()

    async def run(self, arguments: PythonArguments, timeout_s: float) -> tuple[Status, str]:
        """The code's output; its traceback on failure."""
        if len(arguments.code) > self._code_chars:
            size = len(arguments.code)
            return "error", f'Argument "code" has {size} characters; at most {self._code_chars} are allowed.'
        outcome = await run_in_session(
            self._pool, self._sessions, arguments.code, timeout_s, state=arguments.state, keep=arguments.keep
        )
        return cast(Status, outcome.status), outcome.text

    def close(self) -> None:
        """End every running call."""
        self._pool.close()


class SearchTool:
    """Searches the local corpus."""

    name = "search"
    description = "Search a text corpus and return the best matching passages."
    arguments = SearchArguments
    cacheable = True

    def __init__(self, config: SandboxConfig) -> None:
        # Late, since a service without search has no use for scipy.
        from tools_sandbox.corpus import load_corpus
        from tools_sandbox.search import SearchIndex

        began = time.monotonic()
        corpus = load_corpus(config.search.sources, config.search.snippet_chars)
        self._index = SearchIndex(corpus)
        self._max_results = config.search.max_results
        self.fingerprint = f"{self._index.fingerprint} {self._max_results}"
        log.info(
            "search corpus: %d passages, %d remembered queries, %.1f s",
            len(corpus.passages),
            len(corpus.remembered),
            time.monotonic() - began,
        )

    async def run(self, arguments: SearchArguments, timeout_s: float) -> tuple[Status, str]:
        """Results as "Page 1: ..." lines."""
        if not arguments.query.strip():
            return "error", 'Argument "query" is empty; say what to look for.'
        k = min(arguments.k or self._max_results, self._max_results)
        try:
            async with asyncio.timeout(timeout_s):
                return "ok", await asyncio.to_thread(self._index.search, arguments.query, k)
        except TimeoutError:
            return "timeout", f"Time limit exceeded: the search did not finish within {timeout_s:g} s."

    def close(self) -> None:
        """Nothing to give back."""


def build_tools(config: SandboxConfig) -> dict[str, Tool]:
    """The tools of a configuration. Raises ConfigError or SandboxBroken, with nothing left running."""
    tools: list[Tool] = []
    if config.search.sources:
        tools.append(SearchTool(config))
    else:
        log.info("search is not offered: no sources are configured")
    tools.append(PythonTool(config))
    return {tool.name: tool for tool in tools}


def check_arguments(tool: Tool, arguments: Mapping[str, object]) -> BaseModel | ToolAnswer:
    """The checked arguments, or an answer that names what is wrong with them."""
    try:
        return tool.arguments.model_validate(arguments)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        said = "; ".join(f'argument "{".".join(map(str, p["loc"]))}": {p["msg"]}' for p in problems)
        known = ", ".join(tool.arguments.model_fields)
        return ToolAnswer(f'Bad arguments for tool "{tool.name}": {said}. It takes: {known}.', "error", 0.0, False)
