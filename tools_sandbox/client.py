"""Clients of the tool service: `SandboxClient` for plain code and `AsyncSandboxClient` for asyncio.

Both keep their connections open. They retry a bounded number of times after a lost connection or HTTP 5xx. All attempts
of a call carry the same request id, so that the service executes the call once. If the service is full (HTTP 429), the
clients wait as long as it asks, until the deadline of the call.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

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
"""Default `queue_wait_s`. The service queues a call for 120 s (`ToolServiceConfig.queue_s`), then answers 429."""
RETRIES = 4
_REQUEST_TIMEOUT, _TOO_MANY_REQUESTS = 408, 429
_GRACE_S = 1.0
"""Seconds to wait for an answer beyond the deadline, since the service itself answers when the deadline passes."""


class SandboxError(RuntimeError):
    """The service gave no tool answer. (A tool that fails raises nothing: its answer has a status.)"""


class SandboxUnavailable(SandboxError):  # noqa: N818 - the contract's name
    """The service is unreachable, overloaded or shutting down, even after the retries.

    status: the HTTP status that all attempts got; None if they differed or an attempt got no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class SandboxDenied(SandboxError):  # noqa: N818 - the contract's name
    """The service rejected the request (wrong token, malformed request), or it is no tool service. Not retried."""


class _RetryableError(Exception):
    """One attempt failed, but another one may succeed.

    status: the HTTP status, if there was an answer. retry_after_s: the pause that the service asked for.
    """

    def __init__(self, message: str, status: int | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


class _Call:
    """One call over all its attempts: its request, the pauses between attempts, and the reading of answers."""

    def __init__(self, url: str, body: dict[str, object], *, timeout_s: float, deadline_s: float, retries: int) -> None:
        for name, seconds in (("timeout_s", timeout_s), ("deadline_s", deadline_s)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be a positive number of seconds, not {seconds}")
        self._url, self._retries = url, retries
        self._body = body | {"timeout_s": timeout_s}
        self._deadline = time.monotonic() + deadline_s
        self._failures = list[int | None]()

    def left_s(self) -> float:
        """Return the seconds until the deadline of the call; never 0."""
        return max(self._deadline - time.monotonic(), 0.001)

    def body(self) -> dict[str, object]:
        """Return the JSON body of the next attempt."""
        return self._body | {"deadline_s": self.left_s()}

    def pause_s(self, error: _RetryableError) -> float:
        """Return the seconds to wait before the next attempt. Raises SandboxUnavailable if there is none."""
        jitter = random.uniform(1.0, 1.25)
        if error.status == _TOO_MANY_REQUESTS:
            pause_s = max(error.retry_after_s, 0.1) * jitter
            if pause_s < self.left_s():
                return pause_s
            raise self.unavailable(len(self._failures) + 1, error, [error.status]) from error
        self._failures.append(error.status)
        pause_s = min(0.1 * 2.0 ** (len(self._failures) - 1), 2.0) * 0.8 * jitter
        if len(self._failures) > self._retries or pause_s >= self.left_s():
            raise self.unavailable(len(self._failures), error, self._failures) from error
        return pause_s

    def read_answer(self, status: int, headers: Mapping[str, str], content: bytes) -> ToolAnswer:
        """Return the answer in an HTTP reply. Raises _RetryableError (408, 429, 5xx) or SandboxDenied."""
        if status != 200:
            detail = content.decode("utf-8", "replace")
            if status >= 500 or status in (_REQUEST_TIMEOUT, _TOO_MANY_REQUESTS):
                after = headers.get("Retry-After", "")
                retry_after_s = float(after) if after.isdecimal() else 0.0
                raise _RetryableError(f"HTTP {status}: {detail[:200]}", status, retry_after_s)
            message = f"tool service at {self._url} does not accept the request: HTTP {status}: {detail[:500]}"
            raise SandboxDenied(message)
        try:
            return ToolAnswer.from_dict(json.loads(content))
        except ValueError as error:
            raise self.denied(error) from error

    def denied(self, cause: BaseException) -> SandboxDenied:
        """Return the error for a reply that no tool service sends."""
        return SandboxDenied(f"{self._url} does not speak the tool service's protocol: {cause}")

    def unavailable(
        self, attempts: int, cause: BaseException, statuses: Sequence[int | None] = ()
    ) -> SandboxUnavailable:
        """Return the error for a call that is given up after some attempts."""
        status = statuses[0] if len(set(statuses)) == 1 else None
        message = f"tool service at {self._url} is unavailable after {attempts} attempt(s): {cause}"
        return SandboxUnavailable(message, status)


@dataclass(frozen=True, slots=True)
class _Service:
    """The service as both clients see it, and the calls that they begin."""

    url: str
    token: str | None
    retries: int
    queue_wait_s: float

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"the address of a tool service begins with http:// or https://, not {self.url!r}")

    def headers(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def new_call(
        self,
        tool: str,
        arguments: dict[str, object],
        trajectory_id: str,
        timeout_s: float,
        deadline_s: float | None,
        request_id: str | None,
    ) -> _Call:
        body: dict[str, object] = {"tool": tool, "arguments": arguments, "trajectory_id": trajectory_id}
        body["request_id"] = request_id or uuid.uuid4().hex
        if deadline_s is None:
            deadline_s = timeout_s + self.queue_wait_s
        return _Call(self.url, body, timeout_s=timeout_s, deadline_s=deadline_s, retries=self.retries)


class SandboxClient:
    """A client for plain code. Threads may share it.

    token: the service's TOOLS_SANDBOX_TOKEN, if it has one. retries: attempts after the first failed one.
    queue_wait_s: seconds that a call may take beyond its `timeout_s` before the service counts as unavailable.
    Raises ValueError if the url is not an http(s) address.
    """

    def __init__(
        self, url: str, token: str | None = None, *, retries: int = RETRIES, queue_wait_s: float = QUEUE_WAIT_S
    ) -> None:
        self.url = url.rstrip("/")
        self._service = _Service(self.url, token, retries, queue_wait_s)
        self._session = requests.Session()
        # A cluster's HTTP_PROXY must not redirect calls to this machine.
        self._session.trust_env = False
        self._session.headers.update(self._service.headers())
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

        timeout_s: wall-clock seconds that the tool may run. Queueing in the service does not count.
        deadline_s: seconds from now until the call is given up, including all attempts and pauses.
        None: `timeout_s` plus the client's `queue_wait_s`.
        request_id: id of the call. Pass one if you repeat `call` itself, so that the call is executed once.
        Raises SandboxUnavailable, SandboxDenied, and ValueError for seconds that are not positive.
        """
        call = self._service.new_call(tool, arguments, trajectory_id, timeout_s, deadline_s, request_id)
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
            # A service that is silent for so long hangs. A retry would double an already long wait.
            raise call.unavailable(1, error) from error
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            raise _RetryableError(str(error)) from error
        except requests.RequestException as error:  # redirects without end, a reply that cannot be unpacked
            raise call.denied(error) from error
        return call.read_answer(reply.status_code, reply.headers, reply.content)

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
    """A client for asyncio with the arguments and errors of `SandboxClient`. Belongs to one event loop.

    Any number of calls may be in flight. Each has its own connection, which is kept for later calls.
    """

    def __init__(
        self, url: str, token: str | None = None, *, retries: int = RETRIES, queue_wait_s: float = QUEUE_WAIT_S
    ) -> None:
        self.url = url.rstrip("/")
        self._service = _Service(self.url, token, retries, queue_wait_s)
        self._session: aiohttp.ClientSession | None = None

    def _open_session(self) -> aiohttp.ClientSession:
        # Created on first use: a session must be created inside the loop that uses it.
        if self._session is None or self._session.closed:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._service.headers())
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
        """Run a tool and return its answer; see `SandboxClient.call`."""
        call = self._service.new_call(tool, arguments, trajectory_id, timeout_s, deadline_s, request_id)
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
                status, headers, content = reply.status, reply.headers, await reply.read()
        except aiohttp.SocketTimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise _RetryableError(str(error)) from error
            raise call.unavailable(1, error) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _RetryableError(str(error)) from error
        except aiohttp.ClientError as error:
            raise call.denied(error) from error
        return call.read_answer(status, headers, content)

    async def tools(self) -> dict[str, dict[str, Any]]:
        """Return the tools by name, each with its `description` and `arguments` (JSON schema).

        Raises SandboxUnavailable after one attempt, and SandboxDenied.
        """
        limits = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S + _GRACE_S)
        try:
            async with self._open_session().get(f"{self.url}/tools", timeout=limits) as reply:
                if reply.status != 200:
                    error = SandboxUnavailable if reply.status >= 500 else SandboxDenied
                    raise error(f"tool service at {self.url} does not list its tools: HTTP {reply.status}")
                return {tool["name"]: tool for tool in await reply.json()}
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or "no answer"  # a TimeoutError has no text
            raise SandboxUnavailable(f"tool service at {self.url} does not list its tools: {reason}") from error

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
