"""Search engines behind HTTP: a dense retriever and web search."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from tools_sandbox.config import ConfigError, DenseConfig, WebConfig
from tools_sandbox.utils.http_retry import RateLimit, RequestBudget, RequestFailed, request_json


class DenseEngine:
    """A retriever that embeds the query. It is called with POST {"queries": [query], "topk": k}.

    It answers {"result": [[hit, ...]]}. A hit is {"document": {"title"?, "contents" or "text"}} or the document itself.
    """

    def __init__(self, config: DenseConfig) -> None:
        self._config = config
        self.fingerprint = f"dense {config.url}"
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the HTTP session in the running event loop."""
        self._session = aiohttp.ClientSession()

    async def stop(self) -> None:
        """Close the HTTP session, if there is one."""
        if self._session is not None:
            await self._session.close()

    async def search(self, query: str, k: int) -> list[str]:
        """Return at most k passages, best first. Raises RequestFailed."""
        assert self._session is not None
        config, body = self._config, {"queries": [query], "topk": k}
        answer = await request_json(
            self._session, "POST", config.url, timeout_s=config.timeout_s, retries=config.retries, json=body
        )
        try:
            found = answer["result"][0]
            passages = [passage for hit in found if (passage := _passage(hit)) is not None]
            if found and not passages:
                raise TypeError("no hit has a text")
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailed(f"{config.url} answered in another format: {str(answer)[:200]}") from error
        return passages[:k]


def _passage(hit: Any) -> str | None:
    """Return the text of a hit; None if it has another format."""
    document = hit.get("document", hit) if isinstance(hit, dict) else None
    if not isinstance(document, dict):
        return None
    text = document.get("contents", document.get("text"))
    if text is None:
        return None
    title = document.get("title")
    return f"{title}: {text}" if title else str(text)


@dataclass(frozen=True, slots=True)
class _Provider:
    """The request and answer format of one web search provider."""

    url: str | None
    method: str
    key_header: str | None
    request: Callable[[str, int], dict[str, Any]]
    """Function of query and k that returns keyword arguments of the request."""
    hits: tuple[str, ...]
    """Path to the list of hits in the answer."""
    text: str
    """Field of a hit with its snippet."""
    address: str
    """Field of a hit with the address of its page."""


_PROVIDERS = {
    "serper": _Provider(
        "https://google.serper.dev/search",
        "POST",
        "X-API-KEY",
        lambda query, k: {"json": {"q": query, "num": k}},
        ("organic",),
        "snippet",
        "link",
    ),
    "brave": _Provider(
        "https://api.search.brave.com/res/v1/web/search",
        "GET",
        "X-Subscription-Token",
        lambda query, k: {"params": {"q": query, "count": str(min(k, 20))}},
        ("web", "results"),
        "description",
        "url",
    ),
    "searxng": _Provider(
        None, "GET", None, lambda query, k: {"params": {"q": query, "format": "json"}}, ("results",), "content", "url"
    ),
}


@dataclass(frozen=True, slots=True)
class WebHit:
    """A result of web search."""

    snippet: str
    title: str
    url: str
    """Address of its page; "" if the provider names none."""


class WebEngine:
    """A web search engine. Its key comes from the environment and is sent only in a header."""

    def __init__(self, config: WebConfig) -> None:
        """Raises ConfigError if the address or the key is missing, or the file of the cap cannot be locked."""
        self._config, self._provider = config, _PROVIDERS[config.provider]
        url = config.url or self._provider.url
        if url is None:
            raise ConfigError(f"search.web.url: {config.provider} has no public endpoint; name yours")
        self._url, self._headers = url, self._key_headers()
        self.fingerprint = f"web {config.provider} {url}"
        self._rate_limit = RateLimit(config.requests_per_s)
        self._budget = None
        if config.max_requests is not None:
            self._budget = RequestBudget(config.max_requests, config.count_path)
            try:
                self._budget.try_file()
            except OSError as error:
                raise ConfigError(
                    f"search.web.count_path: {config.count_path} cannot be locked ({error.strerror}): name a file on "
                    "another file system"
                ) from error
        self._session: aiohttp.ClientSession | None = None

    def _key_headers(self) -> dict[str, str]:
        header, variable = self._provider.key_header, self._config.key_variable
        if variable is None:
            if header is None:
                return {}
            raise ConfigError(f"search.web.key_variable: {self._config.provider} needs a key; name its variable")
        key = os.environ.get(variable)
        if not key:
            raise ConfigError(f"search.web.key_variable: the environment variable {variable} is not set")
        return {header: key} if header is not None else {"Authorization": f"Bearer {key}"}

    async def start(self) -> None:
        """Open the HTTP session in the running event loop."""
        # The address is public, so the proxies of the environment apply.
        self._session = aiohttp.ClientSession(headers=self._headers, trust_env=True)

    async def stop(self) -> None:
        """Close the HTTP session, if there is one."""
        if self._session is not None:
            await self._session.close()

    async def search(self, query: str, k: int) -> list[str]:
        """Return at most k snippets in the provider's order. Raises RequestFailed."""
        return [hit.snippet for hit in await self.hits(query, k)]

    async def hits(self, query: str, k: int) -> list[WebHit]:
        """Return at most k results in the provider's order. Raises RequestFailed."""
        assert self._session is not None
        answer = await request_json(
            self._session,
            self._provider.method,
            self._url,
            timeout_s=self._config.timeout_s,
            retries=self._config.retries,
            rate_limit=self._rate_limit,
            budget=self._budget,
            **self._provider.request(query, k),
        )
        try:
            for name in self._provider.hits:
                answer = answer.get(name, {})  # a provider that found nothing omits the list
            text, address = self._provider.text, self._provider.address
            hits = [hit for hit in answer or [] if isinstance(hit, dict)]
            if answer and not hits:
                raise TypeError("no hit is an object")
            found = [hit for hit in hits if hit.get(text)][:k]
            return [WebHit(str(hit[text]), str(hit.get("title") or ""), str(hit.get(address) or "")) for hit in found]
        except (AttributeError, KeyError, TypeError) as error:
            raise RequestFailed(f"{self._url} answered in another format") from error
