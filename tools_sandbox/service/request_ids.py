"""Calls by request id: a retry after a broken connection finds its call running or answered, and executes nothing."""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tools_sandbox.answers import ToolAnswer
from tools_sandbox.service.flights import Flights

_ANSWERS = 4096
_BYTES = 64 << 20


class RequestIdReused(ValueError):  # noqa: N818 - a fact
    """The id was given to another call before: a caller's mistake."""


@dataclass(frozen=True, slots=True)
class _Known:
    digest: str
    """Of what was asked under the id."""
    answer: ToolAnswer
    expires: float
    """In seconds of the event loop's clock."""


class Replays:
    """Belongs to one event loop.

    keep_s: how long an answer is kept for a retry. linger_s: how long a call goes on whose connection broke.
    """

    def __init__(self, keep_s: float, linger_s: float) -> None:
        self._keep_s = keep_s
        self._flights: Flights[ToolAnswer] = Flights(linger_s)
        self._under_way: dict[str, str] = {}
        """Digests of the calls in flight."""
        self._answered: OrderedDict[str, _Known] = OrderedDict()
        self._bytes = 0
        self.replayed = 0
        """Retries that executed nothing."""

    async def answer(self, request_id: str, digest: str, work: Callable[[], Awaitable[ToolAnswer]]) -> ToolAnswer:
        """The answer of the call with this id, executed once. RequestIdReused; FlightCancelled if it was ended."""
        self._forget_old()
        known = self._answered.get(request_id)
        before = known.digest if known else self._under_way.get(request_id, digest)
        if before != digest:
            raise RequestIdReused("this request id was used for another call")
        if known is not None:
            self.replayed += 1
            return known.answer
        if request_id in self._flights:
            self.replayed += 1

        async def remembered() -> ToolAnswer:
            self._under_way[request_id] = digest
            try:
                answer = await work()
            finally:
                self._under_way.pop(request_id, None)
            self._keep(request_id, digest, answer)
            return answer

        return await self._flights.join(request_id, remembered)

    def _keep(self, request_id: str, digest: str, answer: ToolAnswer) -> None:
        expires = asyncio.get_running_loop().time() + self._keep_s
        self._answered[request_id] = _Known(digest, answer, expires)
        self._bytes += sys.getsizeof(answer.text)
        while len(self._answered) > _ANSWERS or self._bytes > _BYTES:
            self._forget_oldest()

    def _forget_old(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._answered and next(iter(self._answered.values())).expires <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, known = self._answered.popitem(last=False)
        self._bytes -= sys.getsizeof(known.answer.text)

    async def cancel(self) -> None:
        """End every call in flight."""
        await self._flights.cancel()
