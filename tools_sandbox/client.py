"""Clients of the tool service: one for plain code, its twin for asyncio.

Both keep their connections open and ask again after a lost connection or HTTP 5xx, a bounded number of times. Every
attempt of a call carries the same request id, by which the service knows a call that it has already executed. Where
the service is full (HTTP 429) they wait as long as it says, for as long as the caller's patience lasts.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections.abc import Mapping, Sequence
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
(`SandboxConfig.queue_s`), then says 429."""
RETRIES = 4
_TOO_MANY = 429
_GRACE_S = 1.0
"""How much longer than until the deadline an answer is waited for: the service itself answers when it passes."""


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
    """One attempt failed in a way that another may not.

    status: of the HTTP answer, if there was one. retry_after_s: when to come back, if it said so.
    """

    def __init__(self, message: str, status: int | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


class _Call:
    """One call over all its attempts: what is sent, when to ask again, when to give up."""

    def __init__(
        self,
        url: str,
        body: dict[str, object],
        request_id: str | None,
        *,
        timeout_s: float,
        deadline_s: float,
        retries: int,
    ) -> None:
        for name, seconds in (("timeout_s", timeout_s), ("deadline_s", deadline_s)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be a positive number of seconds, not {seconds}")
        self._url, self._retries = url, retries
        self._body = body | {"timeout_s": timeout_s, "request_id": request_id or uuid.uuid4().hex}
        self._patient_until = time.monotonic() + deadline_s
        self._failures = list[int | None]()

    def left_s(self) -> float:
        """Seconds until nobody waits any more."""
        return max(self._patient_until - time.monotonic(), 0.001)

    def body(self) -> dict[str, object]:
        """JSON of the next attempt."""
        return self._body | {"deadline_s": self.left_s()}

    def pause_s(self, error: _RetryableError) -> float:
        """Seconds to wait before the next attempt. SandboxUnavailable: there is none."""
        spread = random.uniform(1.0, 1.25)  # so that clients do not march in step
        if error.status == _TOO_MANY:
            pause_s = max(error.retry_after_s, 0.1) * spread
            if pause_s < self.left_s():
                return pause_s
            raise _unavailable(self._url, len(self._failures) + 1, error, [error.status]) from error
        self._failures.append(error.status)
        pause_s = min(0.1 * 2.0 ** (len(self._failures) - 1), 2.0) * 0.8 * spread
        if len(self._failures) > self._retries or pause_s >= self.left_s():
            raise _unavailable(self._url, len(self._failures), error, self._failures) from error
        return pause_s


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the address of a tool service begins with http:// or https://, not {url!r}")
    return url.rstrip("/")


def _headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _check_status(url: str, status_code: int, headers: Mapping[str, str], detail: str) -> None:
    """Raise for all but 200: _RetryableError for what passes (429, 5xx), SandboxDenied for what does not."""
    if status_code >= 500 or status_code == _TOO_MANY:
        after = headers.get("Retry-After", "")
        retry_after_s = float(after) if after.isdecimal() else 0.0
        raise _RetryableError(f"HTTP {status_code}: {detail[:200]}", status_code, retry_after_s)
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
    ValueError: the url is no http(s) address.
    """

    def __init__(
        self, url: str, token: str | None = None, *, retries: int = RETRIES, queue_wait_s: float = QUEUE_WAIT_S
    ) -> None:
        self.url = _checked(url)
        self._retries = retries
        self._queue_wait_s = queue_wait_s
        self._session = requests.Session()
        # A cluster's HTTP_PROXY would otherwise carry calls to the own machine away.
        self._session.trust_env = False
        self._session.headers.update(_headers(token))
        self._session.mount("http://", HTTPAdapter(pool_connections=4, pool_maxsize=256))

    def call(
        self,
        tool: str,
        arguments: dict[str, object],
        *,
        trajectory_id: str = "",
        timeout_s: float = 30.0,
        deadline_s: float | None = None,
        request_id: str | None = None,
    ) -> ToolAnswer:
        """Run a tool and return its answer, whatever its status.

        timeout_s: wall-clock seconds the tool may run; waiting for a free place in the service does not count.
        deadline_s: seconds from now after which nobody waits any more, all attempts and pauses together; none:
        timeout_s and the client's queue_wait_s.
        request_id: names this call where `call` itself is repeated, so that it is not executed twice.
        Raises SandboxUnavailable, SandboxDenied; ValueError for seconds that are not positive.
        """
        body: dict[str, object] = {"tool": tool, "arguments": arguments, "trajectory_id": trajectory_id}
        call = _Call(
            self.url,
            body,
            request_id,
            timeout_s=timeout_s,
            deadline_s=timeout_s + self._queue_wait_s if deadline_s is None else deadline_s,
            retries=self._retries,
        )
        while True:
            try:
                return self._attempt(call)
            except _RetryableError as error:
                time.sleep(call.pause_s(error))

    def _attempt(self, call: _Call) -> ToolAnswer:
        timeouts = (min(CONNECT_TIMEOUT_S, call.left_s()), call.left_s() + _GRACE_S)
        try:
            reply = self._session.post(f"{self.url}/call", json=call.body(), timeout=timeouts)
        except requests.ReadTimeout as error:
            # A service silent for that long hangs; asking again would double an already long wait.
            raise _unavailable(self.url, 1, error) from error
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            raise _RetryableError(str(error)) from error
        _check_status(self.url, reply.status_code, reply.headers, reply.text)
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
        self.url = _checked(url)
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
        self,
        tool: str,
        arguments: dict[str, object],
        *,
        trajectory_id: str = "",
        timeout_s: float = 30.0,
        deadline_s: float | None = None,
        request_id: str | None = None,
    ) -> ToolAnswer:
        """As `SandboxClient.call`."""
        body: dict[str, object] = {"tool": tool, "arguments": arguments, "trajectory_id": trajectory_id}
        call = _Call(
            self.url,
            body,
            request_id,
            timeout_s=timeout_s,
            deadline_s=timeout_s + self._queue_wait_s if deadline_s is None else deadline_s,
            retries=self._retries,
        )
        while True:
            try:
                return await self._attempt(call)
            except _RetryableError as error:
                await asyncio.sleep(call.pause_s(error))

    async def _attempt(self, call: _Call) -> ToolAnswer:
        left_s = call.left_s()
        connect_s = min(CONNECT_TIMEOUT_S, left_s)
        limits = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=left_s + _GRACE_S)
        try:
            async with self._open_session().post(f"{self.url}/call", json=call.body(), timeout=limits) as reply:
                if reply.status != 200:
                    detail = await reply.text(errors="replace")
                    _check_status(self.url, reply.status, reply.headers, detail)
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
