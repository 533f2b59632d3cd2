"""Requests to a server of OpenAI's chat protocol, with a deadline for each, and checks of the replies.

Used for the judge and for evaluated servers. The openai client repeats failed requests, but does not check whether a
reply with status 200 is a completion (a proxy's login page is not).
"""

import asyncio
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai

from arpo_megatron.utils.text import whole_characters

MAX_REPLY_BYTES = 16 * 2**20
"""Largest unpacked body; a completion of 100,000 tokens takes less than one of these megabytes."""
MAX_TOKENS = 10**7
"""Longer than any context: larger token counts of a server are ignored."""


def with_version(url: str) -> str:
    """Return the base address of OpenAI's protocol: the server's own with `/v1`, unless it has a path already."""
    return url.rstrip("/") + ("" if urlsplit(url).path.strip("/") else "/v1")


class UnreadableReplyError(Exception):
    """The server answered with status 200 and something other than the protocol promises."""


class Trouble(Enum):
    """Kinds of failed requests, by whether a retry can succeed."""

    SERVER = "server"  # busy or down: the same request may succeed later
    REQUEST = "request"  # this request fails, others succeed
    ACCESS = "access"  # address, model, key or account: every request fails until that is fixed


def classify_status(status: int) -> Trouble:
    """Return the kind of failure of an HTTP status; an unknown status blames the request."""
    if status >= 500 or status in (408, 409, 425, 429):
        return Trouble.SERVER
    if status < 400 or status in (401, 402, 403, 404, 407, 410):
        return Trouble.ACCESS
    return Trouble.REQUEST


@dataclass(frozen=True, slots=True)
class Completion:
    """Reply of a chat model, with its token counts."""

    text: str
    """"" for a refusal or a reply of thoughts alone; no unpaired surrogates."""
    finish_reason: str | None
    """The server's word: "stop", "length", ..."""
    prompt_tokens: int | None
    """Tokens of the request; None if the server does not count, or counts more than `MAX_TOKENS`."""
    completion_tokens: int | None
    """Tokens of the reply; None as for the prompt."""
    repeated: int
    """How often the request was repeated before this reply."""


class _BoundedClient(openai.DefaultAsyncHttpxClient):
    """Bounds time and size of a whole reply. httpx's timeouts bound single reads: a server that sends a byte now and
    then would hold a request forever.
    """

    def __init__(self, deadline_s: float) -> None:
        super().__init__()
        self._deadline_s = deadline_s

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Send a request and read the reply, up to `MAX_REPLY_BYTES`."""
        try:
            async with asyncio.timeout(self._deadline_s):
                response = await super().send(request, **{**options, "stream": True})
                try:
                    return await _read(response)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise httpx.ReadTimeout(f"no whole reply within {self._deadline_s:g} s", request=request) from None


async def _read(response: httpx.Response) -> httpx.Response:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_REPLY_BYTES:
            break
    # These describe the body as it was sent; it is unpacked now.
    dropped = ("content-encoding", "content-length", "transfer-encoding")
    headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in dropped]
    return httpx.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)


def open_client(url: str, *, key: str | None, deadline_s: float, retries: int) -> openai.AsyncOpenAI:
    """Return a client of a server, an async context manager.

    Args:
        url: base address, e.g. http://HOST:PORT/v1.
        key: API key; None if the server needs none.
        deadline_s: wall time of one reply.
        retries: how often a failed request is repeated.
    """
    return openai.AsyncOpenAI(
        base_url=url,
        api_key=key or "none",
        timeout=None,  # the deadline is the HTTP client's
        max_retries=retries,
        http_client=_BoundedClient(deadline_s),
    )


async def complete(client: openai.AsyncOpenAI, **request: Any) -> Completion:
    """Request one completion.

    Args:
        client: client of the server.
        request: parameters of `chat.completions.create`.

    Raises:
        UnreadableReplyError: the reply is no completion.
        openai.APIError: the request failed.
    """
    answer = await client.chat.completions.with_raw_response.create(**request)
    body = _json(answer)
    try:
        choice = body["choices"][0]
        text, reason = choice["message"].get("content"), choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError):
        raise UnreadableReplyError(f"a reply that is no chat completion: {_start(answer.text)}") from None
    if not isinstance(text, str | None):
        raise UnreadableReplyError(f"a chat completion whose content is no text: {_start(answer.text)}")
    usage = body.get("usage")
    prompt_tokens, completion_tokens = (_count(usage, name) for name in ("prompt_tokens", "completion_tokens"))
    return Completion(
        whole_characters(text or ""),
        reason if isinstance(reason, str) else None,
        prompt_tokens,
        completion_tokens,
        answer.retries_taken,
    )


async def model_names(client: openai.AsyncOpenAI) -> list[str]:
    """Return the names of the server's models. Raises as `complete` does."""
    answer = await client.models.with_raw_response.list()
    body = _json(answer)
    try:
        return [whole_characters(str(model["id"])) for model in body["data"]]
    except (LookupError, TypeError):
        raise UnreadableReplyError(f"a reply that is no list of models: {_start(answer.text)}") from None


def _json(answer: Any) -> Any:
    if len(answer.content) > MAX_REPLY_BYTES:
        raise UnreadableReplyError(f"a reply of more than {MAX_REPLY_BYTES // 2**20} MiB: {_start(answer.text)}")
    try:
        return json.loads(answer.text)
    except (ValueError, RecursionError):
        raise UnreadableReplyError(f"a reply that is not JSON: {_start(answer.text)}") from None


def _start(text: str) -> str:
    return repr(" ".join(text[:200].split())[:80])


def _count(usage: Any, name: str) -> int | None:
    found = usage.get(name) if isinstance(usage, dict) else None
    return found if type(found) is int and 0 <= found <= MAX_TOKENS else None  # true is an int too
