"""Requests to a server that speaks OpenAI's chat protocol: each with a deadline, each reply read or refused.

A judge and an evaluated server are asked through here. The openai client repeats what failed on the way; what it does
not look at is whether a reply with status 200 is one (a proxy's login page is not).
"""

import asyncio
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx
import openai

from arpo_megatron.utils.text import whole_characters

MAX_REPLY_BYTES = 16 * 2**20
"""Of a body, unpacked; a completion of a hundred thousand tokens has less than one of these megabytes."""
MAX_TOKENS = 10**7
"""No context is as long: a server that counts more counts nothing."""


class UnreadableReplyError(Exception):
    """The server answered with status 200 and something that is not what the protocol promises."""


class Trouble(Enum):
    """What a status that is no success is about."""

    SERVER = "server"  # ill, busy or away: the same request may be answered later
    REQUEST = "request"  # this one is not answered, others are
    ACCESS = "access"  # address, model, key or account: none is answered until somebody mends that


def trouble_of(status: int) -> Trouble:
    """What an HTTP status that is no success is about; one that is not known is taken for this request's."""
    if status >= 500 or status in (408, 409, 425, 429):
        return Trouble.SERVER
    if status < 400 or status in (401, 402, 403, 404, 407, 410):
        return Trouble.ACCESS
    return Trouble.REQUEST


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model said.

    Attributes:
        text: "" where it said nothing (a refusal, or all of it thoughts); of whole characters.
        finish_reason: as the server has it: "stop", "length", ...
        prompt_tokens: of the request, at most `MAX_TOKENS`; None: the server does not count, or no such number.
        completion_tokens: of the whole reply; likewise.
        repeated: how often the request was sent again before this came.
    """

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    repeated: int


class _BoundedClient(openai.DefaultAsyncHttpxClient):
    """Bounds a request as a whole. httpx's timeouts bound one read each: a byte now and then would hold it for ever,
    and nothing bounds how much is read.
    """

    def __init__(self, deadline_s: float) -> None:
        super().__init__()
        self._deadline_s = deadline_s

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """With the body, which is cut behind `MAX_REPLY_BYTES`."""
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
    """The response with its body, as far as that is read."""
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_REPLY_BYTES:
            break
    # The body is unpacked and whole by now, and these speak of how it came.
    dropped = ("content-encoding", "content-length", "transfer-encoding")
    headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in dropped]
    return httpx.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)


def connected(url: str, *, key: str | None, deadline_s: float, retries: int) -> openai.AsyncOpenAI:
    """A client of the server; use as `async with`.

    Args:
        url: base address, e.g. http://HOST:PORT/v1.
        key: that the server wants; None: it wants none.
        deadline_s: of one reply, wall time in seconds.
        retries: how often a request that failed is sent again.
    """
    return openai.AsyncOpenAI(
        base_url=url,
        api_key=key or "none",
        timeout=None,  # the deadline is the HTTP client's
        max_retries=retries,
        http_client=_BoundedClient(deadline_s),
    )


async def complete(client: openai.AsyncOpenAI, **request: Any) -> Completion:
    """One completion.

    Args:
        client: of the server.
        request: parameters of `chat.completions.create`.

    Raises:
        UnreadableReplyError: the reply is no completion.
        openai.APIError: there is none.
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
    prompt, said = (_count(usage, name) for name in ("prompt_tokens", "completion_tokens"))
    return Completion(
        whole_characters(text or ""), reason if isinstance(reason, str) else None, prompt, said, answer.retries_taken
    )


async def model_names(client: openai.AsyncOpenAI) -> list[str]:
    """The models that the server has. Raises as `complete` does."""
    answer = await client.models.with_raw_response.list()
    body = _json(answer)
    try:
        return [whole_characters(str(model["id"])) for model in body["data"]]
    except (LookupError, TypeError):
        raise UnreadableReplyError(f"a reply that is no list of models: {_start(answer.text)}") from None


def _json(answer: Any) -> Any:
    """What a raw response holds."""
    if len(answer.content) > MAX_REPLY_BYTES:
        raise UnreadableReplyError(f"a reply of more than {MAX_REPLY_BYTES // 2**20} MiB: {_start(answer.text)}")
    try:
        return json.loads(answer.text)
    except (ValueError, RecursionError):
        raise UnreadableReplyError(f"a reply that is not JSON: {_start(answer.text)}") from None


def _start(text: str) -> str:
    """What a reply begins with, on one line."""
    return repr(" ".join(text[:200].split())[:80])


def _count(usage: Any, name: str) -> int | None:
    found = usage.get(name) if isinstance(usage, dict) else None
    return found if type(found) is int and 0 <= found <= MAX_TOKENS else None  # true is an int too
