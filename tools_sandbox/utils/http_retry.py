"""Requests to services that this one depends on: paced, and repeated while a failure may pass."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class RequestFailed(RuntimeError):  # noqa: N818 - a state
    """There is no answer, also after the retries; the message says nothing of keys."""


class Pace:
    """At most `per_s` departures a second, evenly spaced; belongs to one event loop."""

    def __init__(self, per_s: float) -> None:
        self._gap_s = 1.0 / per_s
        self._next = 0.0

    async def wait(self) -> None:
        """Return when it is this caller's turn."""
        now = asyncio.get_running_loop().time()
        at = max(now, self._next)
        self._next = at + self._gap_s
        await asyncio.sleep(at - now)


async def request_json(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    timeout_s: float,
    retries: int,
    pace: Pace | None = None,
    **request: Any,
) -> Any:
    """The JSON of an answer. HTTP 429, 5xx and lost connections are tried again, as `Retry-After` says if it does.

    timeout_s: of one attempt. request: as of aiohttp. Raises RequestFailed.
    """
    said = ""
    for attempt in range(retries + 1):
        if pace is not None:
            await pace.wait()
        pause_s = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)
        try:
            limit = aiohttp.ClientTimeout(total=timeout_s)
            async with session.request(method, url, timeout=limit, **request) as reply:
                if reply.status == 200:
                    return await reply.json(content_type=None)
                said = f"HTTP {reply.status}"
                if reply.status != 429 and reply.status < 500:
                    break
                after = reply.headers.get("Retry-After", "")
                if after.isdecimal():
                    pause_s = min(max(pause_s, float(after)), _LONGEST_PAUSE_S)
        except ValueError as error:  # not JSON
            raise RequestFailed(f"{url} answered no JSON: {error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            said = f"{type(error).__name__}: {error}"
        if attempt < retries:
            await asyncio.sleep(pause_s)
    raise RequestFailed(f"{url}: {said}")
