"""HTTP requests to other services: at a bounded rate, with retries of temporary failures."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0


class RequestFailed(RuntimeError):  # noqa: N818 - a state
    """The request failed, also after its retries. The message contains no keys.

    lasting: a later request would fail, too: a wrong key, an empty account.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


class RateLimit:
    """A rate limit: at most `per_s` requests per second, evenly spaced. Belongs to one event loop."""

    def __init__(self, per_s: float) -> None:
        self._gap_s = 1.0 / per_s
        self._next = 0.0

    async def wait(self) -> None:
        """Return when it is the caller's turn."""
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
    rate_limit: RateLimit | None = None,
    **request: Any,
) -> Any:
    """Return the JSON of an answer. Retry after HTTP 429, 5xx and lost connections, and honour `Retry-After`.

    timeout_s: time limit of one attempt. request: keyword arguments of aiohttp's `request`. Raises RequestFailed.
    """
    problem, lasting = "", False
    for attempt in range(retries + 1):
        if rate_limit is not None:
            await rate_limit.wait()
        pause_s = min(_FIRST_PAUSE_S * 2**attempt, _MAX_PAUSE_S) * random.uniform(0.75, 1.25)
        try:
            limit = aiohttp.ClientTimeout(total=timeout_s)
            async with session.request(method, url, timeout=limit, **request) as reply:
                if reply.status == 200:
                    return await reply.json(content_type=None)
                problem = f"HTTP {reply.status}"
                if lasting := reply.status != 429 and reply.status < 500:
                    break
                after = reply.headers.get("Retry-After", "")
                if after.isdecimal():
                    pause_s = min(max(pause_s, float(after)), _MAX_PAUSE_S)
        except ValueError as error:  # not JSON
            raise RequestFailed(f"{url} answered no JSON: {error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        if attempt < retries:
            await asyncio.sleep(pause_s)
    raise RequestFailed(f"{url}: {problem}", lasting=lasting)
