"""Deduplication: equal work in flight runs once, and a retry with a known request id executes nothing."""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from tools_sandbox.answers import ToolAnswer

T = TypeVar("T")

_MAX_ANSWERS = 4096
_MAX_BYTES = 64 << 20


class WorkCancelled(Exception):  # noqa: N818 - a state, not a mistake
    """The shared work was cancelled, not the caller that waited for it."""


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class SingleFlight(Generic[T]):
    """Tasks by key. Callers that ask for a key while its task runs share the task. Belongs to one event loop.

    linger_s: seconds that a task without waiters keeps running, so that a caller can return to it.
    """

    def __init__(self, linger_s: float = 0.0) -> None:
        self._linger_s = linger_s
        self._flights: dict[str, _Flight[T]] = {}

    def __contains__(self, key: str) -> bool:
        flight = self._flights.get(key)
        # A task that is being cancelled takes no new waiters.
        return flight is not None and not flight.task.cancelling()

    async def join(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the key's task in flight, or of a new one that runs `work`.

        Raises what the work raised, or WorkCancelled if something other than this caller cancelled it.
        """
        if key not in self:
            task = asyncio.create_task(_as_coroutine(work))
            self._flights[key] = _Flight(task)
            task.add_done_callback(partial(self._remove, key))
        flight = self._flights[key]
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError as error:
            if flight.task.cancelled():
                raise WorkCancelled from error
            raise
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                asyncio.get_running_loop().call_later(self._linger_s, self._cancel_if_abandoned, flight)

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended. Their waiters get WorkCancelled."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _remove(self, key: str, task: asyncio.Task[T]) -> None:
        if (flight := self._flights.get(key)) is not None and flight.task is task:
            del self._flights[key]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: a task without waiters must not log its exception

    @staticmethod
    def _cancel_if_abandoned(flight: _Flight[T]) -> None:
        if not flight.waiters:
            flight.task.cancel()


async def _as_coroutine(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


class RequestIdReused(ValueError):  # noqa: N818 - a fact
    """The request id belongs to another call: a mistake of the caller."""


@dataclass(frozen=True, slots=True)
class _KnownAnswer:
    digest: str
    """Digest of the call that used the id."""
    answer: ToolAnswer
    expires: float
    """Expiry in seconds of the event loop's clock."""


class RequestDeduplicator:
    """Calls by request id: a retry joins its call in flight or gets the kept answer. Belongs to one event loop.

    keep_s: seconds that an answer is kept for a retry.
    linger_s: seconds that a call keeps running after its connection broke.
    """

    def __init__(self, keep_s: float, linger_s: float) -> None:
        self._keep_s = keep_s
        self._flights: SingleFlight[ToolAnswer] = SingleFlight(linger_s)
        self._digests_in_flight: dict[str, str] = {}
        self._answered: OrderedDict[str, _KnownAnswer] = OrderedDict()
        self._bytes = 0
        self.retries_answered = 0
        """Number of retries that executed nothing."""

    async def answer(self, request_id: str, digest: str, work: Callable[[], Awaitable[ToolAnswer]]) -> ToolAnswer:
        """Return the answer of the call with this id, which is executed once.

        Raises RequestIdReused if the id belongs to a call with another digest; WorkCancelled if the call was cancelled.
        """
        self._drop_expired()
        known = self._answered.get(request_id)
        expected_digest = known.digest if known else self._digests_in_flight.get(request_id, digest)
        if digest != expected_digest:
            raise RequestIdReused("this request id was used for another call")
        if known is not None:
            self.retries_answered += 1
            return known.answer
        if request_id in self._flights:
            self.retries_answered += 1

        async def execute_and_keep() -> ToolAnswer:
            self._digests_in_flight[request_id] = digest
            try:
                answer = await work()
            finally:
                self._digests_in_flight.pop(request_id, None)
            self._keep(request_id, digest, answer)
            return answer

        return await self._flights.join(request_id, execute_and_keep)

    def _keep(self, request_id: str, digest: str, answer: ToolAnswer) -> None:
        expires = asyncio.get_running_loop().time() + self._keep_s
        self._answered[request_id] = _KnownAnswer(digest, answer, expires)
        self._bytes += sys.getsizeof(answer.text)
        while len(self._answered) > _MAX_ANSWERS or self._bytes > _MAX_BYTES:
            self._drop_oldest()

    def _drop_expired(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._answered and next(iter(self._answered.values())).expires <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, known = self._answered.popitem(last=False)
        self._bytes -= sys.getsizeof(known.answer.text)

    async def cancel(self) -> None:
        await self._flights.cancel()
