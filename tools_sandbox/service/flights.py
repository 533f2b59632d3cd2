"""Work that several callers wait for: done once, for as long as anybody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class FlightCancelled(Exception):  # noqa: N818 - a state, not a mistake
    """The work itself was cancelled, not the caller who waited for it."""


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class Flights(Generic[T]):
    """Tasks by key, each shared by those who ask for its key while it runs. Belongs to one event loop.

    linger_s: how long a task that nobody waits for any more goes on, in case somebody comes back.
    """

    def __init__(self, linger_s: float = 0.0) -> None:
        self._linger_s = linger_s
        self._flights: dict[str, _Flight[T]] = {}

    def __contains__(self, key: str) -> bool:
        flight = self._flights.get(key)
        # One that is being ended takes nobody aboard.
        return flight is not None and not flight.task.cancelling()

    async def join(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of the task under way for this key, of a new one if there is none.

        Raises what the work raised; FlightCancelled if it was cancelled from elsewhere.
        """
        if key not in self:
            task = asyncio.create_task(_as_coroutine(work))
            self._flights[key] = _Flight(task)
            task.add_done_callback(partial(self._landed, key))
        flight = self._flights[key]
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError as error:
            if flight.task.cancelled():
                raise FlightCancelled from error
            raise
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                asyncio.get_running_loop().call_later(self._linger_s, self._abandon, flight)

    async def cancel(self) -> None:
        """End everything under way, and wait until it has ended; those who wait get FlightCancelled."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _landed(self, key: str, task: asyncio.Task[T]) -> None:
        if (flight := self._flights.get(key)) is not None and flight.task is task:
            del self._flights[key]
        if not task.cancelled():
            task.exception()  # who still waits gets it; if nobody does, nobody has to know

    @staticmethod
    def _abandon(flight: _Flight[T]) -> None:
        if not flight.waiters:
            flight.task.cancel()


async def _as_coroutine(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
