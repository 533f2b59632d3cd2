"""Client of the tool service that survives its restarts, overload and failures at single calls.

A lost call is sent again with the same request id, so a service that is still running executes it once. After a restart
the call is executed again. That is safe: a search only reads, and a Python call writes its interpreter state
(`sandbox.sessions`) under a name that follows from its path, starting from the same state before it. So another service
may execute it, too.
"""

import asyncio
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Sequence
from itertools import cycle
from types import TracebackType
from typing import Self

from arpo_megatron.rollout.result_cache import ResultCache
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS, ToolDefinition, select_tools
from tools_sandbox.client import AsyncSandboxClient, SandboxError, SandboxUnavailable, ToolAnswer

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 5.0
_REST_S = 60.0
"""Seconds for which a service that gave no answer gets no calls of trees, except one that tries it at their end."""
_TOO_MANY_REQUESTS = 429


class ToolBlockedError(SandboxError):
    """No call of a tool succeeds until its operator acts: the run must stop, or it loses every branch that calls it."""


def service_of(trajectory_id: str, services: int, resting: Collection[int] = ()) -> int:
    """Return the index of the tool service for a trajectory, which follows from its task: the text before a slash.

    If that service rests, the tasks that belong to it are divided among those that do not.
    """
    others, own = divmod(zlib.crc32(trajectory_id.partition("/")[0].encode()), services)
    up = [index for index in range(services) if index not in resting]
    return own if own in up or not up else up[others % len(up)]


class ToolClient:
    """Client of a job's tool services for one event loop. Use as `async with`.

    Args:
        urls: http://host:port of each service, separated by spaces. All calls of a task go to one of them, and to
            another while that one gives no answer.
        token: bearer token of the services; None if they need none.
        retry_for_s: time after a call's first failure during which it is retried (the service may be restarting).
    """

    def __init__(self, urls: str, token: str | None = None, *, retry_for_s: float = 60.0) -> None:
        self._clients = [AsyncSandboxClient(url, token) for url in urls.split()]
        self._rests_until = [0.0] * len(self._clients)
        """Time on the monotonic clock until which each service gets no calls if another is up."""
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
            SandboxUnavailable: all services were unavailable for `retry_for_s` seconds.
        """
        if names is None:
            return DEFAULT_TOOLS
        give_up = time.monotonic() + self._retry_for_s
        clients = cycle(self._clients)
        while True:
            try:
                return select_tools(names, await next(clients).tools())
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
        request_id = uuid.uuid4().hex
        give_up, pause_s = float("inf"), _FIRST_PAUSE_S
        answer: ToolAnswer | None
        while True:
            service = self._choose(trajectory_id)
            try:
                answer = await self._clients[service].call(
                    tool, arguments, trajectory_id=trajectory_id, timeout_s=timeout_s, request_id=request_id
                )
                self._rests_until[service] = 0.0
                if answer.failure == "none":
                    return answer
                if answer.failure == "blocked":
                    raise ToolBlockedError(answer.text)
                error = SandboxUnavailable(answer.text)
                request_id = uuid.uuid4().hex  # the service would repeat its answer to the old one
            except SandboxUnavailable as unavailable:
                answer, error = None, unavailable
                if unavailable.status != _TOO_MANY_REQUESTS:
                    self._rests_until[service] = time.monotonic() + _REST_S
            now = time.monotonic()
            give_up = min(give_up, now + self._retry_for_s)
            if now >= give_up or (answer is not None and answer.failure == "lasting"):
                raise error
            on_retry()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _choose(self, trajectory_id: str) -> int:
        """Return the index of the service for a trajectory's call. A rest that is over is renewed for other calls."""
        now = time.monotonic()
        resting = [index for index, until in enumerate(self._rests_until) if until > now]
        chosen = service_of(trajectory_id, len(self._clients), resting)
        if self._rests_until[chosen]:
            self._rests_until[chosen] = now + _REST_S
        return chosen
