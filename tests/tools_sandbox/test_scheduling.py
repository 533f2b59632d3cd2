"""The fair queue, and the sharing of work in flight, for any order of events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools_sandbox.service.deduplication import SingleFlight, WorkCancelled
from tools_sandbox.service.scheduling import FairQueue, QueueFull


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40), st.integers(1, 3))
def test_waiting_flows_differ_by_at_most_one_turn(flows: list[str], slots: int) -> None:

    async def run() -> list[str]:
        queue, started, all_wait = FairQueue(slots, 100), list[str](), asyncio.Event()

        async def block() -> None:
            async with queue.slot("blocker", 10):
                await all_wait.wait()

        async def call(flow: str) -> None:
            async with queue.slot(flow, 10):
                assert queue.running <= slots
                started.append(flow)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(block()) for _ in range(slots)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(call(flow)) for flow in flows]
        await asyncio.sleep(0)
        assert queue.waiting == len(flows)
        all_wait.set()
        await asyncio.gather(*tasks)
        assert (queue.running, queue.waiting) == (0, 0)
        return started

    started = asyncio.run(run())
    assert sorted(started) == sorted(flows)
    for turn in range(len(started)):
        had, waiting = Counter(started[:turn]), Counter(started[turn:])
        assert all(had[one] - had[other] <= 1 for one in "abcd" for other in waiting)


def test_single_late_call_passes_hundred_early_ones() -> None:
    async def run() -> int:
        queue, started = FairQueue(1, 1000), list[str]()

        async def call(flow: str) -> None:
            async with queue.slot(flow, 10):
                started.append(flow)
                await asyncio.sleep(0.001)

        hog = [asyncio.create_task(call("hog")) for _ in range(100)]
        await asyncio.sleep(0.01)
        await call("late")
        at = started.index("late")
        before = sum(each == "hog" for each in started[:at])
        await asyncio.gather(*hog)
        return 100 - before

    assert asyncio.run(run()) >= 80


def test_full_queue_refuses_flow_with_most_waiting() -> None:
    async def run() -> tuple[list[bool], bool]:
        queue = FairQueue(1, 4)

        async def call(flow: str) -> bool:
            try:
                async with queue.slot(flow, 10):
                    await asyncio.sleep(0.01)
            except QueueFull:
                return False
            return True

        hog = [asyncio.create_task(call("hog")) for _ in range(5)]
        await asyncio.sleep(0)
        other = await call("other")
        return list(await asyncio.gather(*hog)), other

    hog, other = asyncio.run(run())
    assert other
    assert hog == [True, True, True, True, False]


def test_refused_and_abandoned_calls_cost_no_turn() -> None:
    async def run() -> int:
        queue, started = FairQueue(1, 50), list[str]()

        async def call(flow: str, wait_s: float = 10) -> None:
            async with queue.slot(flow, wait_s):
                started.append(flow)
                await asyncio.sleep(0)

        async with queue.slot("blocker", 10):
            abandoned = [asyncio.create_task(call("unlucky", 0.02)) for _ in range(300)]
            await asyncio.gather(*abandoned, return_exceptions=True)
            others = [asyncio.create_task(call("other")) for _ in range(20)]
            last = asyncio.create_task(call("unlucky"))
            await asyncio.sleep(0)
            assert not started
        await asyncio.gather(last, *others)
        return started.index("unlucky")

    assert asyncio.run(run()) <= 3


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["run", "cancel", "time out"])), max_size=25))
def test_slots_are_never_lost(events: list[tuple[str, str]]) -> None:
    async def run() -> None:
        queue = FairQueue(2, 10)

        async def call(flow: str, wait_s: float) -> None:
            async with queue.slot(flow, wait_s):
                await asyncio.sleep(0)

        tasks = list[asyncio.Task[None]]()
        for flow, event in events:
            tasks.append(asyncio.create_task(call(flow, 0 if event == "time out" else 5)))
            if event == "cancel":
                await asyncio.sleep(0)
                tasks[-1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (queue.running, queue.waiting) == (0, 0)
        async with queue.slot("later", 1):
            assert queue.running == 1

    asyncio.run(run())


def test_queue_memory_does_not_grow_with_past_flows() -> None:
    async def run() -> int:
        queue = FairQueue(1, 10)
        for number in range(5000):
            async with queue.slot(f"flow {number}", 1):
                pass
        return len(queue._flows) + len(queue._heap)

    assert asyncio.run(run()) < 1100


class Work:
    """Work that takes until `proceed` is set."""

    def __init__(self) -> None:
        self.began = self.ended = 0
        self.proceed = asyncio.Event()

    async def __call__(self) -> int:
        self.began += 1
        await self.proceed.wait()
        self.ended += 1
        return self.began


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_shared_work_ends_with_its_last_waiter() -> None:
    async def run() -> None:
        shared, work = SingleFlight[int](), Work()
        first, second = (asyncio.create_task(shared.join("k", work)) for _ in range(2))
        await until(lambda: work.began == 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.sleep(0.01)  # otherwise it would have ended by now
        work.proceed.set()
        assert await second == 1
        work.proceed.clear()
        third = asyncio.create_task(shared.join("k", work))
        await until(lambda: work.began == 2)
        third.cancel()
        await until(lambda: "k" not in shared)
        work.proceed.set()
        await asyncio.sleep(0.01)
        assert (work.began, work.ended) == (2, 1)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_returning_waiter_finds_lingering_work() -> None:
    async def leave(shared: SingleFlight[int], work: Work) -> None:
        gone, before = asyncio.create_task(shared.join("k", work)), work.began
        await until(lambda: work.began == before + 1)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)

    async def run() -> None:
        shared, work = SingleFlight[int](linger_s=600.0), Work()
        await leave(shared, work)
        back = asyncio.create_task(shared.join("k", work))
        await asyncio.sleep(0.01)
        work.proceed.set()
        assert await back == 1
        brief = SingleFlight[int](linger_s=0.02)
        work.proceed.clear()
        await leave(brief, work)
        assert "k" in brief
        await until(lambda: "k" not in brief)  # its linger time has passed
        work.proceed.set()
        assert await brief.join("k", work) == 3
        assert (work.began, work.ended) == (3, 2)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_waiters_learn_of_cancelled_work() -> None:
    async def run() -> None:
        shared = SingleFlight[int]()
        waiting = asyncio.create_task(shared.join("k", work := Work()))
        await until(lambda: work.began == 1)
        await shared.cancel()
        with pytest.raises(WorkCancelled):
            await waiting

    asyncio.run(run())
