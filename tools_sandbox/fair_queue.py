"""Who runs next: places for a number of calls, given out fairly between trajectories.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with calls of equal size: a call's tag is the virtual time at which
its trajectory's turn begins, so a trajectory that asks for a thousand things at once waits behind its own calls and
not in front of everybody else's.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class QueueFull(Exception):  # noqa: N818 - a state, not a mistake
    """No room to wait: this trajectory has more calls waiting than any other."""


@dataclass(order=True, slots=True)
class _Waiting:
    tag: int
    number: int
    flow: str = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


class FairQueue:
    """Places, and the calls that wait for one. Belongs to one event loop.

    places: calls that may run at a time. max_waiting: calls that may wait.
    """

    def __init__(self, places: int, max_waiting: int) -> None:
        self.places, self.max_waiting = places, max_waiting
        self.running = self.waiting = 0
        self._heap: list[_Waiting] = []
        self._waiting_of: Counter[str] = Counter()
        """Calls that wait, by flow; without zeros."""
        self._next_tag: dict[str, int] = {}
        """Flows whose next call would start later than now."""
        self._now = 0
        self._numbers = itertools.count()

    @asynccontextmanager
    async def place(self, flow: str, wait_s: float) -> AsyncIterator[None]:
        """Hold a place. TimeoutError: none became free within wait_s. QueueFull: too many wait, most of this flow."""
        await self._enter(flow, wait_s)
        try:
            yield
        finally:
            self.running -= 1
            self._give_places()

    async def _enter(self, flow: str, wait_s: float) -> None:
        waiting = _Waiting(self._tag(flow), next(self._numbers), flow, asyncio.get_running_loop().create_future())
        heapq.heappush(self._heap, waiting)
        self._waiting_of[flow] += 1
        self.waiting += 1
        self._give_places()
        if not waiting.turn.done() and self.waiting > self.max_waiting:
            self._refuse_one(flow)
        try:
            async with asyncio.timeout(wait_s):
                await waiting.turn
        except BaseException:
            if waiting.turn.done() and not waiting.turn.cancelled() and waiting.turn.exception() is None:
                # The place came in the same moment as the end of waiting: pass it on.
                self.running -= 1
                self._give_places()
            elif waiting.turn.cancelled():
                self._leave(flow)
            raise

    def _tag(self, flow: str) -> int:
        tag = max(self._now, self._next_tag.get(flow, 0))
        self._next_tag[flow] = tag + 1
        return tag

    def _give_places(self) -> None:
        while self.running < self.places and self._heap:
            first = heapq.heappop(self._heap)
            if first.turn.done():  # it no longer waits
                continue
            self._now = max(self._now, first.tag)
            self._leave(first.flow)
            self.running += 1
            first.turn.set_result(None)
        if len(self._next_tag) + len(self._heap) > 2 * self.waiting + 1024:
            # Who has nothing waiting is at most one turn ahead of the others; that may be forgotten.
            self._next_tag = {flow: self._next_tag[flow] for flow in self._waiting_of}
            self._heap = [each for each in self._heap if not each.turn.done()]
            heapq.heapify(self._heap)

    def _refuse_one(self, newcomer: str) -> None:
        """The flow with most calls waiting loses its last one; among equals the one that came."""
        flow = max(self._waiting_of, key=lambda each: (self._waiting_of[each], each == newcomer))
        last = max(each for each in self._heap if each.flow == flow and not each.turn.done())
        self._leave(flow)
        last.turn.set_exception(QueueFull())
        self._heap.remove(last)
        heapq.heapify(self._heap)

    def _leave(self, flow: str) -> None:
        self.waiting -= 1
        self._waiting_of[flow] -= 1
        if not self._waiting_of[flow]:
            del self._waiting_of[flow]
