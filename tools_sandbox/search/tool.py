"""The search tool: remembered queries first, then one search engine."""

from __future__ import annotations

from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from tools_sandbox.answers import ToolResult
from tools_sandbox.config import ConfigError, SearchConfig
from tools_sandbox.search.index import SearchIndex
from tools_sandbox.search.remote import DenseEngine, WebEngine
from tools_sandbox.tool import Tool, ToolBroken, in_thread
from tools_sandbox.utils.http_retry import RequestFailed

NO_RESULTS = "No results found."
_REJECTED = (400, 413, 414, 422)
"""HTTP statuses of a provider that mean the query."""


class SearchArguments(BaseModel):
    """Arguments of the search tool."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    query: str = Field(description="What to look for, in words.")
    k: int | None = Field(default=None, ge=1, description="Most results wanted; none: as many as the service gives.")


class SearchEngine(Protocol):
    """An engine that finds passages for a query."""

    fingerprint: str
    """Changes when the engine's answers may change."""

    async def start(self) -> None:
        """Prepare searches. Called once, in the process that searches."""

    async def stop(self) -> None:
        """Release the resources that `start` has acquired."""

    async def search(self, query: str, k: int) -> list[str]:
        """Return at most k passages, best first. Raises RequestFailed if the engine gives no answer."""


class LocalEngine:
    """An engine that ranks the passages of the sources by BM25."""

    def __init__(self, index: SearchIndex) -> None:
        self._index = index
        self.fingerprint = "bm25"

    async def start(self) -> None:
        """Do nothing: the index is open."""

    async def stop(self) -> None:
        """Do nothing: the index stays open until the process ends."""

    async def search(self, query: str, k: int) -> list[str]:
        """Return at most k passages that contain a word of the query."""
        return await in_thread(self._index.ranked, query, k)


class SearchTool(Tool):
    """The search tool. It answers remembered queries from the index and others from one engine.

    An answer has the format of the ARPO authors: "Page 1: ...\\nPage 2: ...".
    """

    name = "search"
    description = "Search and return the best matching passages."
    arguments = SearchArguments
    cacheable = True

    def __init__(self, config: SearchConfig) -> None:
        """Raises ConfigError if the engine's section is missing or a source cannot be used with the engine."""
        self._config = config
        self._index = SearchIndex(config.index_path) if config.index_path is not None and config.sources else None
        self._engine = self._make_engine()
        self.in_worker = config.engine == "local"
        self.remote = not self.in_worker
        index_fingerprint = self._index.fingerprint if self._index else ""
        self.fingerprint = f"{self._engine.fingerprint} {index_fingerprint} {config.max_results} {config.snippet_chars}"

    def _make_engine(self) -> SearchEngine:
        config = self._config
        if config.engine == "local":
            assert self._index is not None
            return LocalEngine(self._index)
        for source in config.sources:
            if source.format != "arpo_cache":
                raise ConfigError(f'search.sources: {source.path} is searched by engine "local" only')
        if config.engine == "dense":
            if config.dense is None:
                raise ConfigError('search.dense: is missing, and search.engine is "dense"')
            return DenseEngine(config.dense)
        if config.web is None:
            raise ConfigError('search.web: is missing, and search.engine is "web"')
        return WebEngine(config.web)

    async def start(self) -> None:
        """Open the connections of the search engine, before the first call."""
        await self._engine.start()

    async def stop(self) -> None:
        """Close the connections of the search engine, after the last call."""
        await self._engine.stop()

    async def run(self, arguments: SearchArguments, timeout_s: float) -> ToolResult:
        """Return the results as "Page 1: ..." lines, or NO_RESULTS."""
        if not arguments.query.strip():
            return ToolResult("error", 'Argument "query" is empty; say what to look for.')
        k = min(arguments.k or self._config.max_results, self._config.max_results)
        pages = self._index.remembered(arguments.query) if self._index else None
        if pages is not None:
            return self.listed(pages[:k])
        try:
            return await self.find(arguments.query, k, timeout_s)
        except RequestFailed as error:
            if error.status in _REJECTED:
                return ToolResult("error", f"The search engine does not accept the query (HTTP {error.status}).")
            raise ToolBroken(str(error), blocked=error.blocked) from error

    async def find(self, query: str, k: int, timeout_s: float) -> ToolResult:
        """Return the engine's snippets for a query. Raises RequestFailed."""
        return self.listed(await self._engine.search(query, k))

    def listed(self, pages: list[str]) -> ToolResult:
        """Return snippets as "Page 1: ..." lines, or NO_RESULTS."""
        limit = self._config.snippet_chars
        lines = [f"Page {number}: {' '.join(page.split())[:limit]}" for number, page in enumerate(pages, start=1)]
        return ToolResult("ok", "\n".join(lines)) if lines else ToolResult("ok", NO_RESULTS, negative=True)
