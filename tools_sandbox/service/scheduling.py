"""Who runs next: places for a number of calls, given out fairly between trajectories.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with calls of equal size: a trajectory's tag is the virtual time at
which its next turn begins, so one that asks for a thousand things at once waits behind its own calls and not in front
of everybody else's. Only a call that gets a place moves the tag: what was refused, or gave up, took nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class QueueFull(Exception):  # noqa: N818 - a state, not a mistake
    """No room to wait: this trajectory has more calls waiting than any other."""


@dataclass(slots=True, eq=False)
class _Flow:
    tag: int = 0
    """Virtual time of its next turn."""
    running: int = 0
    turns: deque[asyncio.Future[None]] = field(default_factory=deque)
    """Of its calls that wait, in order."""
    offered: bool = False
    """It is in the heap."""


class FairQueue:
    """Places, and the calls that wait for one. Belongs to one event loop.

    places: calls that may run at a time, of one flow at most three quarters of them, so that calls that never end keep
    no other flow from running. max_waiting: calls that may wait.
    """

    def __init__(self, places: int, max_waiting: int) -> None:
        self.places, self.max_waiting = places, max_waiting
        self._places_of_one = max(3 * places // 4, 1)
        self.running = self.waiting = 0
        self._flows: dict[str, _Flow] = {}
        """Flows with calls, and some of those whose next call would start later than now."""
        self._heap: list[tuple[int, int, _Flow]] = []
        """Flows that have calls waiting and may run one more, by tag, then by when they came; each once."""
        self._now = 0
        self._numbers = itertools.count()

    @asynccontextmanager
    async def place(self, flow: str, wait_s: float) -> AsyncIterator[None]:
        """Hold a place. TimeoutError: none became free within wait_s. QueueFull: too many wait, most of this flow."""
        state = self._flows.setdefault(flow, _Flow())
        await self._enter(state, wait_s)
        try:
            yield
        finally:
            self._leave(state)

    async def _enter(self, flow: _Flow, wait_s: float) -> None:
        turn = asyncio.get_running_loop().create_future()
        if not flow.turns:
            flow.tag = max(flow.tag, self._now)
        flow.turns.append(turn)
        self.waiting += 1
        self._offer(flow)
        self._give_places()
        if not turn.done() and self.waiting > self.max_waiting:
            self._refuse_one(flow)
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except BaseException:
            if turn in flow.turns:
                flow.turns.remove(turn)
                self.waiting -= 1
            elif not turn.cancelled() and turn.exception() is None:
                # The place came in the same moment as the end of waiting: pass it on.
                self._leave(flow)
            raise

    def _leave(self, flow: _Flow) -> None:
        self.running -= 1
        flow.running -= 1
        self._offer(flow)
        self._give_places()

    def _offer(self, flow: _Flow) -> None:
        if flow.turns and flow.running < self._places_of_one and not flow.offered:
            flow.offered = True
            heapq.heappush(self._heap, (flow.tag, next(self._numbers), flow))

    def _give_places(self) -> None:
        while self.running < self.places and self._heap:
            tag, _, flow = heapq.heappop(self._heap)
            flow.offered = False
            while flow.turns and flow.turns[0].done():  # it was cancelled in this moment
                flow.turns.popleft()
                self.waiting -= 1
            if not flow.turns or tag < flow.tag:  # its calls gave up; perhaps others have come since
                self._offer(flow)
                continue
            self._now = max(self._now, flow.tag)
            flow.tag += 1
            self.running += 1
            flow.running += 1
            self.waiting -= 1
            flow.turns.popleft().set_result(None)
            self._offer(flow)
        if len(self._flows) > 2 * (self.waiting + self.running) + 1024:
            # Who has nothing waiting is at most one turn ahead of the others; that may be forgotten.
            self._flows = {name: flow for name, flow in self._flows.items() if flow.turns or flow.running}

    def _refuse_one(self, newcomer: _Flow) -> None:
        """The flow with most calls waiting loses its last one; among equals the one that came."""
        flow = max(self._flows.values(), key=lambda each: (len(each.turns), each is newcomer))
        last = flow.turns.pop()
        self.waiting -= 1
        if not last.done():  # it was cancelled in this moment
            last.set_exception(QueueFull())
