"""Parsing of pages inside the walls of the python tool: a page may exploit its parser, or make it take gigabytes.

Each page has a process without network, keys or files, forked from one that has loaded the parser. Its memory and time
are bounded, and it ends with its call. Other pages, searches and the worker do not wait for it.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict

from tools_sandbox.browse.page import FetchFailed, Page
from tools_sandbox.config import BrowseConfig, ConfigError, Limits, PythonConfig
from tools_sandbox.python_tool.pool import PythonPool, SandboxBroken, SandboxFull
from tools_sandbox.python_tool.state import pack_state
from tools_sandbox.tool import ToolBroken

_CODE = "import tools_sandbox.browse.text\ntools_sandbox.browse.text.answer(page, max_chars)"
_JSON_CHARS_PER_CHAR = 12
"""Longest escape of one character."""


class PageParser:
    """The processes that parse pages. Belongs to one event loop once pages are parsed."""

    def __init__(self, config: BrowseConfig, python: PythonConfig) -> None:
        """python: its `isolation` is required for pages, too."""
        self._config = config
        seconds = math.ceil(config.timeout_s)
        answer_chars = _JSON_CHARS_PER_CHAR * config.max_chars + 10_000
        limits = Limits(
            time_s=seconds,
            cpu_s=seconds,
            memory_mib=config.parse_mib,
            file_mib=1,
            disk_mib=1,
            processes=8,
            open_files=64,
            output_chars=answer_chars,
            output_mib=(answer_chars >> 20) + 1,
        )
        self._pool = PythonPool(
            PythonConfig(preload=(), isolation=python.isolation, ahead=0),
            limits,
            own_modules=("tools_sandbox.browse.preloaded",),
        )

    def start(self) -> None:
        """Start the process that others are forked from. Raises ConfigError if it cannot start."""
        try:
            self._pool.start()
        except SandboxBroken as error:
            raise ConfigError(f"browse: {error}") from error

    def close(self) -> None:
        self._pool.close()

    async def parse(self, page: Page, max_chars: int) -> tuple[str, int]:
        """Return the beginning of the page's text, and the number of characters of all of it.

        max_chars: longest beginning in characters, at most that of the configuration. If cancelled, end the process.
        Raises FetchFailed for a bad page, TimeoutError for one that takes too long, ToolBroken if no process can be
        started.
        """
        state = io.BytesIO(pack_state({"page": asdict(page), "max_chars": max_chars}))
        try:
            outcome = await self._pool.run(_CODE, self._config.timeout_s, state=state)
        except (SandboxBroken, SandboxFull) as error:
            raise ToolBroken(str(error)) from error
        if outcome.status == "timeout":
            raise TimeoutError
        # The process may be under the control of the page: its answer may be anything.
        try:
            answer = json.loads(outcome.text) if outcome.status == "ok" else {}
        except (ValueError, RecursionError):
            answer = {}
        match answer:
            case {"text": str(text), "chars": int(chars)}:
                return text[:max_chars], chars
            case {"failed": str(reason), "lasting": bool(lasting)}:
                raise FetchFailed(reason[:max_chars], lasting=lasting)
        reason = f"{page.url} cannot be parsed, at least not within {self._config.parse_mib} MiB."
        raise FetchFailed(reason, lasting=True)
