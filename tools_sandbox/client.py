"""Clients of the tool service: one for plain code, its twin for asyncio.

Both keep their connections open and retry what is safe to retry. Every tool of the service is (a Python call leaves
nothing behind, a search only reads), so a lost connection is simply asked again, a bounded number of times.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

import aiohttp
import requests
from requests.adapters import HTTPAdapter

from tools_sandbox.answers import Status, ToolAnswer

__all__ = [
    "AsyncSandboxClient",
    "SandboxClient",
    "SandboxDenied",
    "SandboxError",
    "SandboxUnavailable",
    "Status",
    "ToolAnswer",
]

CONNECT_TIMEOUT_S = 5.0
QUEUE_WAIT_S = 150.0
"""How much longer than the call's own limit an answer may take: the service queues a call for 120 s at most
(`SandboxConfig.queue_s`), then says 503."""
RETRIES = 4


class SandboxError(RuntimeError):
    """The service gave no tool answer. (A tool that fails is no error here: it answers with a status.)"""


class SandboxUnavailable(SandboxError):  # noqa: N818 - the contract's name
    """The service cannot be reached, is overloaded or shutting down, also after the retries.

    status: of its HTTP answers; None where attempts ended differently, or without one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class SandboxDenied(SandboxError):  # noqa: N818 - its twin
    """The service answered and did not accept the request: wrong token or malformed request. Not retried."""


class _RetryableError(Exception):
    """One attempt failed in a way that another may not; `status`: of the HTTP answer, if there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def _pauses_s(retries: int) -> Iterator[float]:
    """Seconds to wait after each failed attempt: doubling from 0.1 s, spread so that clients do not march in step."""
    for attempt in range(retries):
        yield min(0.1 * 2**attempt, 2.0) * random.uniform(0.75, 1.25)


def _body(tool: str, arguments: dict[str, object], trajectory_id: str, timeout_s: float) -> dict[str, object]:
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(f"timeout_s must be a positive number of seconds, not {timeout_s}")
    return {"tool": tool, "arguments": arguments, "trajectory_id": trajectory_id, "timeout_s": timeout_s}


def _headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _check_status(url: str, status_code: int, detail: str) -> None:
    """Raise for everything but 200: _RetryableError for what passes (5xx), SandboxDenied for what does not."""
    if status_code >= 500:
        raise _RetryableError(f"HTTP {status_code}: {detail[:200]}", status_code)
    if status_code != 200:
        raise SandboxDenied(f"tool service at {url} does not accept the request: HTTP {status_code}: {detail[:500]}")


def _parsed(url: str, data: object) -> ToolAnswer:
    try:
        return ToolAnswer.from_dict(data)
    except ValueError as error:
        raise SandboxDenied(f"{url} does not speak the tool service's protocol: {error}") from error


def _unavailable(
    url: str, attempts: int, cause: BaseException, statuses: Sequence[int | None] = ()
) -> SandboxUnavailable:
    status = statuses[0] if len(set(statuses)) == 1 else None
    return SandboxUnavailable(f"tool service at {url} is unavailable after {attempts} attempt(s): {cause}", status)


class SandboxClient:
    """Calls tools from plain code; safe to share between threads.

    token: the service's TOOLS_SANDBOX_TOKEN, if it has one. retries: attempts after the first failed one.
    queue_wait_s: seconds a call may take beyond its own `timeout_s` before the service counts as unavailable.
    """

    def __init__(
        self, url: str, token: str | None = None, *, retries: int = RETRIES, queue_wait_s: float = QUEUE_WAIT_S
    ) -> None:
        self.url = url.rstrip("/")
        self._retries = retries
        self._queue_wait_s = queue_wait_s
        self._session = requests.Session()
        # A cluster's HTTP_PROXY would otherwise carry calls to the own machine away.
        self._session.trust_env = False
        self._session.headers.update(_headers(token))
        self._session.mount("http://", HTTPAdapter(pool_connections=4, pool_maxsize=256))

    def call(
        self, tool: str, arguments: dict[str, object], *, trajectory_id: str = "", timeout_s: float = 30.0
    ) -> ToolAnswer:
        """Run a tool and return its answer, whatever its status.

        timeout_s: wall-clock seconds the tool may run; waiting for a free place in the service does not count.
        Raises SandboxUnavailable, SandboxDenied; ValueError for a timeout that is not positive.
        """
        body = _body(tool, arguments, trajectory_id, timeout_s)
        pauses, statuses = _pauses_s(self._retries), list[int | None]()
        for attempt in range(1, self._retries + 2):
            try:
                return self._attempt(body, timeout_s + self._queue_wait_s)
            except _RetryableError as error:
                statuses.append(error.status)
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise _unavailable(self.url, attempt, error, statuses) from error
                time.sleep(pause_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _attempt(self, body: dict[str, object], limit_s: float) -> ToolAnswer:
        try:
            reply = self._session.post(f"{self.url}/call", json=body, timeout=(CONNECT_TIMEOUT_S, limit_s))
        except requests.ReadTimeout as error:
            # A service silent for that long hangs; asking again would double an already long wait.
            raise _unavailable(self.url, 1, error) from error
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            raise _RetryableError(str(error)) from error
        _check_status(self.url, reply.status_code, reply.text)
        try:
            data: object = reply.json()
        except requests.JSONDecodeError as error:
            raise SandboxDenied(f"{self.url} does not speak the tool service's protocol: {error}") from error
        return _parsed(self.url, data)

    def close(self) -> None:
        """Close the kept connections. The client can be used again afterwards."""
        self._session.close()

    def __enter__(self) -> SandboxClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncSandboxClient:
    """The twin of `SandboxClient` for asyncio: same arguments, same errors. Belongs to one event loop.

    Any number of calls may be in flight; each has its own kept connection.
    """

    def __init__(
        self, url: str, token: str | None = None, *, retries: int = RETRIES, queue_wait_s: float = QUEUE_WAIT_S
    ) -> None:
        self.url = url.rstrip("/")
        self._retries = retries
        self._queue_wait_s = queue_wait_s
        self._headers = _headers(token)
        self._session: aiohttp.ClientSession | None = None

    def _open_session(self) -> aiohttp.ClientSession:
        # Made on first use, since a session must be born inside the loop that uses it.
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers)
        return self._session

    async def call(
        self, tool: str, arguments: dict[str, object], *, trajectory_id: str = "", timeout_s: float = 30.0
    ) -> ToolAnswer:
        """As `SandboxClient.call`."""
        body = _body(tool, arguments, trajectory_id, timeout_s)
        pauses, statuses = _pauses_s(self._retries), list[int | None]()
        for attempt in range(1, self._retries + 2):
            try:
                return await self._attempt(body, timeout_s + self._queue_wait_s)
            except _RetryableError as error:
                statuses.append(error.status)
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise _unavailable(self.url, attempt, error, statuses) from error
                await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(self, body: dict[str, object], limit_s: float) -> ToolAnswer:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=limit_s)
        try:
            async with self._open_session().post(f"{self.url}/call", json=body, timeout=limits) as reply:
                if reply.status != 200:
                    _check_status(self.url, reply.status, await reply.text(errors="replace"))
                data: object = await reply.json()
        except aiohttp.SocketTimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise _RetryableError(str(error)) from error
            raise _unavailable(self.url, 1, error) from error
        except aiohttp.ContentTypeError as error:
            raise SandboxDenied(f"{self.url} does not speak the tool service's protocol: {error}") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _RetryableError(str(error)) from error
        except ValueError as error:  # the body is not JSON
            raise SandboxDenied(f"{self.url} does not speak the tool service's protocol: {error}") from error
        return _parsed(self.url, data)

    async def aclose(self) -> None:
        """Close the kept connections. The client can be used again afterwards."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> AsyncSandboxClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
