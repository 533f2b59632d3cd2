"""Tool calls that survive the tool service: it may be restarted, overloaded, or fail at one call for good.

A call that was lost is made again, under the same request id: a service that still lives executes it once. After a
restart it is executed again, which is safe: a search only reads, and what a Python call leaves behind
(`sandbox.sessions`) has the name of its place, which the second execution writes anew from the same state before it.
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tools_sandbox.client import AsyncSandboxClient, SandboxUnavailable, ToolAnswer

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
_FAILED = 500  # the service lives and fails at this call


class ToolClient:
    """Client of the tool service at `url`, for one event loop. Use as `async with`.

    Args:
        url: http://host:port.
        token: bearer token of the service, if it has one.
        retry_for_s: how long after its first failure a call is repeated (the service may be restarting).
    """

    def __init__(self, url: str, token: str | None = None, *, retry_for_s: float = 60.0) -> None:
        self._client = AsyncSandboxClient(url, token)
        self._retry_for_s = retry_for_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def call(
        self,
        tool: str,
        arguments: dict[str, object],
        *,
        trajectory_id: str,
        timeout_s: float,
        on_retry: Callable[[], None] = lambda: None,
    ) -> ToolAnswer:
        """The tool's answer, whatever its status; where the service fails at the call, an error for the model to read.

        `on_retry` is called for each time that the call is made again, after the service's own client has given up.

        Raises:
            SandboxUnavailable: the service was not there for `retry_for_s` seconds.
            SandboxDenied: it does not accept the request.
        """
        request_id = uuid.uuid4().hex
        started, give_up, pause_s = time.monotonic(), float("inf"), _FIRST_PAUSE_S
        while True:
            try:
                return await self._client.call(
                    tool, arguments, trajectory_id=trajectory_id, timeout_s=timeout_s, request_id=request_id
                )
            except SandboxUnavailable as error:
                now = time.monotonic()
                if error.status == _FAILED:
                    text = f"The {tool} tool failed; this is not the fault of the call."
                    return ToolAnswer(text, "error", now - started, cached=False)
                give_up = min(give_up, now + self._retry_for_s)
                if now >= give_up:
                    raise
            on_retry()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
