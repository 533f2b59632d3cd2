"""Fair queueing: slots for a number of running calls, shared fairly between trajectories.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with calls of equal size. The tag of a trajectory is the virtual time
at which its next turn begins. A trajectory that sends a thousand calls at once therefore waits after its own calls and
not before those of others. Only a call that gets a slot moves the tag: a refused or abandoned call costs no turn.
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
    """The queue is full, and this trajectory has more waiting calls than any other."""


@dataclass(slots=True, eq=False)
class _Flow:
    tag: int = 0
    """Virtual time of its next turn."""
    running: int = 0
    turns: deque[asyncio.Future[None]] = field(default_factory=deque)
    """Futures of its waiting calls, in order."""
    in_heap: bool = False


class FairQueue:
    """Slots for running calls, and the calls that wait for one. Belongs to one event loop.

    slots: calls that may run at a time.
    max_waiting: calls that may wait.
    """

    def __init__(self, slots: int, max_waiting: int) -> None:
        self.slots, self.max_waiting = slots, max_waiting
        self.running = self.waiting = 0
        self._flows: dict[str, _Flow] = {}
        """Flows with calls, and some idle flows whose next turn lies in the future."""
        self._heap: list[tuple[int, int, _Flow]] = []
        """Flows that have waiting calls, by tag, then by arrival. Each flow is in it once."""
        self._now = 0
        self._numbers = itertools.count()

    @asynccontextmanager
    async def slot(self, flow: str, wait_s: float) -> AsyncIterator[None]:
        """Hold a slot. Raises TimeoutError after `wait_s` without one, QueueFull if too many calls wait."""
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
        self._give_slots()
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
                # The slot was given in the same moment in which waiting ended: pass it on.
                self._leave(flow)
            raise

    def _leave(self, flow: _Flow) -> None:
        self.running -= 1
        flow.running -= 1
        self._give_slots()

    def _offer(self, flow: _Flow) -> None:
        if flow.turns and not flow.in_heap:
            flow.in_heap = True
            heapq.heappush(self._heap, (flow.tag, next(self._numbers), flow))

    def _give_slots(self) -> None:
        while self.running < self.slots and self._heap:
            tag, _, flow = heapq.heappop(self._heap)
            flow.in_heap = False
            while flow.turns and flow.turns[0].done():  # cancelled in this moment
                flow.turns.popleft()
                self.waiting -= 1
            if not flow.turns or tag < flow.tag:  # its calls gave up; new ones may have come since
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
            # A flow without calls is at most one turn ahead of the others, which may be forgotten.
            self._flows = {name: flow for name, flow in self._flows.items() if flow.turns or flow.running}

    def _refuse_one(self, newcomer: _Flow) -> None:
        """Refuse the last call of the flow with the most waiting calls; among equal flows, the newcomer's."""
        flow = max(self._flows.values(), key=lambda each: (len(each.turns), each is newcomer))
        last = flow.turns.pop()
        self.waiting -= 1
        if not last.done():  # else it was cancelled in this moment
            last.set_exception(QueueFull())
