"""SGLang's function-call parser, through the engines: importing SGLang takes seconds and hundreds of megabytes."""

import ast
import asyncio
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from arpo_megatron.engine.client import EngineUnavailableError
from arpo_megatron.engine.wire.endpoints import bearer

_PAUSE_S = 0.5
_TIMEOUT_S = 60.0
_SOURCE = Path("srt", "function_call", "function_call_parser.py")


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call that the parser has found."""

    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn without its calls, and the calls."""

    text: str
    calls: tuple[FunctionCall, ...]


class CallParser:
    """Asks the engines to parse the calls of a turn. Use as `async with`.

    Args:
        urls: http://host:port of each engine; the first that answers is used.
        token: bearer token of the engines; None if they need none.
        retry_for_s: time after a request's first failure during which it is retried.
    """

    def __init__(self, *urls: str, token: str | None = None, retry_for_s: float = 60.0) -> None:
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._headers = bearer(token)
        self._retry_for_s = retry_for_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __call__(self, text: str, functions: Sequence[dict[str, Any]], parser: str) -> ParsedTurn:
        """Return what `parser` finds in a turn.

        Args:
            text: the turn.
            functions: the tools in OpenAI's form.
            parser: SGLang's name of the model's format.

        Raises:
            EngineUnavailableError: no engine answered for `retry_for_s` seconds.
        """
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        body = {"text": text, "tools": list(functions), "tool_call_parser": parser}
        clock = asyncio.get_running_loop().time
        give_up = clock() + self._retry_for_s
        while True:
            for url in self._urls:
                try:
                    async with self._session.post(f"{url}/parse_function_call", json=body) as reply:
                        reply.raise_for_status()
                        return _read(await reply.json())
                except (aiohttp.ClientError, TimeoutError) as error:
                    reason = f"{url}: {error or type(error).__name__}"
            if clock() >= give_up:
                raise EngineUnavailableError(f"no engine parses the calls of a turn: {reason}")
            await asyncio.sleep(_PAUSE_S)


def _read(answer: dict[str, Any]) -> ParsedTurn:
    calls = tuple(FunctionCall(call["name"] or "", call["parameters"]) for call in answer["calls"])
    return ParsedTurn(answer["normal_text"], calls)


def known_parsers() -> tuple[str, ...]:
    """Return the names of SGLang's parsers, read from its source; () if they are not found there."""
    found = importlib.util.find_spec("sglang")
    folders = found.submodule_search_locations if found is not None else None
    source = Path(next(iter(folders))) / _SOURCE if folders else _SOURCE
    if not source.is_file():
        return ()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "ToolCallParserEnum":
            keys = node.value.keys if isinstance(node.value, ast.Dict) else []
            return tuple(sorted(str(key.value) for key in keys if isinstance(key, ast.Constant)))
    return ()
