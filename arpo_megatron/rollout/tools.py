"""Client of the tool service that survives its restarts, overload and failures at single calls.

A lost call is sent again with the same request id, so a service that is still running executes it once. After a restart
the call is executed again. That is safe: a search only reads, and a Python call writes its interpreter state
(`sandbox.sessions`) under a name that follows from its path, starting from the same state before it.
"""

import asyncio
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from arpo_megatron.rollout.result_cache import ResultCache
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS, ToolDefinition, select_tools
from tools_sandbox.client import AsyncSandboxClient, SandboxError, SandboxUnavailable, ToolAnswer

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 5.0


class ToolBlockedError(SandboxError):
    """No call of a tool succeeds until its operator acts: the run must stop, or it loses every branch that calls it."""


def service_of(trajectory_id: str, services: int) -> int:
    """Return the index of the tool service for a trajectory, which follows from its task: the text before a slash."""
    return zlib.crc32(trajectory_id.partition("/")[0].encode()) % services


class ToolClient:
    """Client of a job's tool services for one event loop. Use as `async with`.

    Args:
        urls: http://host:port of each service, separated by spaces. All calls of a task go to one of them.
        token: bearer token of the services; None if they need none.
        retry_for_s: time after a call's first failure during which it is retried (the service may be restarting).
    """

    def __init__(self, urls: str, token: str | None = None, *, retry_for_s: float = 60.0) -> None:
        self._clients = [AsyncSandboxClient(url, token) for url in urls.split()]
        self._retry_for_s = retry_for_s
        self.results = ResultCache()
        """Answers of deterministic tools."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients:
            await client.aclose()

    async def select(self, names: Sequence[str] | None) -> tuple[ToolDefinition, ...]:
        """Return the tools that the policy may call, given `rollout.tools`; None: the default ones.

        Raises:
            UserError: the service does not offer a tool.
            SandboxUnavailable: the service was unavailable for `retry_for_s` seconds.
        """
        if names is None:
            return DEFAULT_TOOLS
        give_up = time.monotonic() + self._retry_for_s
        while True:
            try:
                return select_tools(names, await self._clients[0].tools())
            except SandboxUnavailable:
                if time.monotonic() >= give_up:
                    raise
            await asyncio.sleep(_FIRST_PAUSE_S)

    async def call(
        self,
        tool: str,
        arguments: dict[str, object],
        *,
        trajectory_id: str,
        timeout_s: float,
        on_retry: Callable[[], None] = lambda: None,
    ) -> ToolAnswer:
        """Return the tool's answer with any status, unless a service, the network or a provider has failed.

        Args:
            tool: name of the tool.
            arguments: arguments of the call.
            trajectory_id: names the trajectory to the service.
            timeout_s: deadline of the tool.
            on_retry: called before each retry, after the service's client has given up.

        Raises:
            SandboxUnavailable: the call failed for `retry_for_s` seconds, or a repetition is no use.
            SandboxDenied: the service does not accept the request.
            ToolBlockedError: no call of the tool succeeds until its operator acts.
        """
        client = self._clients[service_of(trajectory_id, len(self._clients))]
        request_id = uuid.uuid4().hex
        give_up, pause_s = float("inf"), _FIRST_PAUSE_S
        answer: ToolAnswer | None
        while True:
            try:
                answer = await client.call(
                    tool, arguments, trajectory_id=trajectory_id, timeout_s=timeout_s, request_id=request_id
                )
                if answer.failure == "none":
                    return answer
                if answer.failure == "blocked":
                    raise ToolBlockedError(answer.text)
                error = SandboxUnavailable(answer.text)
                request_id = uuid.uuid4().hex  # the service would repeat its answer to the old one
            except SandboxUnavailable as unavailable:
                answer, error = None, unavailable
            now = time.monotonic()
            give_up = min(give_up, now + self._retry_for_s)
            if now >= give_up or (answer is not None and answer.failure == "lasting"):
                raise error
            on_retry()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
