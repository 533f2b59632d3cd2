"""HTTP requests to other services: at a bounded rate, with retries of temporary failures."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
from pathlib import Path
from typing import Any

import aiohttp

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
_BLOCKED = (401, 402, 403)
_DIGITS = 20


class RequestFailed(RuntimeError):  # noqa: N818 - a state
    """The request failed, also after its retries. The message contains no keys.

    status: the last HTTP status that was not retried; None if there was none.
    blocked: why no request succeeds until the operator acts; "" if that is not so. It contains no address.
    """

    def __init__(self, message: str, *, status: int | None = None, blocked: str = "") -> None:
        super().__init__(message)
        self.status, self.blocked = status, blocked


class RequestBudget:
    """A cap of requests that holds over restarts. Services on one machine may share its file.

    path: file with the number of requests so far; None: they are counted in memory.
    """

    def __init__(self, limit: int, path: Path | None) -> None:
        self._limit, self._path, self._used = limit, path, 0

    def try_file(self) -> None:
        """Raise OSError if the file cannot be opened or locked, for example since its file system has no locks."""
        if self._path is not None:
            os.close(self._open(self._path))

    def spend(self) -> None:
        """Count a request. Raises RequestFailed if the cap is reached, and OSError."""
        if self._path is None:
            self._check(self._used)
            self._used += 1
            return
        file = self._open(self._path)
        try:
            used = int(os.read(file, _DIGITS) or b"0")
            self._check(used)
            # In place and of one length: a full disk or a kill leaves the old number or the new one.
            os.pwrite(file, b"%0*d" % (_DIGITS, used + 1), 0)
        finally:
            os.close(file)

    @staticmethod
    def _open(path: Path) -> int:
        """Return a descriptor that holds the lock until it is closed."""
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            os.close(file)
            raise
        return file

    def _check(self, used: int) -> None:
        if used >= self._limit:
            where = "" if self._path is None else f"; {self._path} counts them"
            reason = f"search.web.max_requests={self._limit} is reached{where}"
            raise RequestFailed(reason, blocked=reason)


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
    budget: RequestBudget | None = None,
    **request: Any,
) -> Any:
    """Return the JSON of an answer. Retry after HTTP 429, 5xx and lost connections, and honour `Retry-After`.

    timeout_s: time limit of one attempt. request: keyword arguments of aiohttp's `request`. Raises RequestFailed.
    """
    problem, blocked, status = "", "", None
    for attempt in range(retries + 1):
        if rate_limit is not None:
            await rate_limit.wait()
        if budget is not None:
            budget.spend()
        pause_s = min(_FIRST_PAUSE_S * 2**attempt, _MAX_PAUSE_S) * random.uniform(0.75, 1.25)
        try:
            limit = aiohttp.ClientTimeout(total=timeout_s)
            async with session.request(method, url, timeout=limit, **request) as reply:
                if reply.status == 200:
                    return await reply.json(content_type=None)
                problem = f"HTTP {reply.status}"
                if reply.status in _BLOCKED:
                    blocked = f"the provider answers HTTP {reply.status}: check key and account"
                if reply.status != 429 and reply.status < 500:
                    status = reply.status
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
    raise RequestFailed(f"{url}: {problem}", status=status, blocked=blocked)
