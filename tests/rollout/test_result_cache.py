"""Equal calls share one execution, unless it has failed."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from arpo_megatron.rollout import result_cache
from arpo_megatron.rollout.result_cache import ResultCache, history_digest
from tools_sandbox.answers import Status
from tools_sandbox.client import SandboxUnavailable, ToolAnswer


def test_equal_calls_share_an_execution_but_not_a_failure() -> None:
    executed: list[str] = []

    def answers(*statuses: Status | None) -> Callable[[], Awaitable[ToolAnswer]]:
        left = list(statuses)

        async def execute() -> ToolAnswer:
            await asyncio.sleep(0)
            status = left.pop(0)
            executed.append(str(status))
            if status is None:
                raise SandboxUnavailable("gone")
            return ToolAnswer("text", status, 1.0, cached=False)

        return execute

    async def run() -> None:
        cache, execute = ResultCache(), answers("ok")
        together = await asyncio.gather(*(cache.answer("a", execute) for _ in range(3)))
        assert [hit for _, hit in together] == [False, True, True]
        execute = answers(None, "timeout", "error")
        with pytest.raises(SandboxUnavailable):
            await cache.answer("b", execute)
        found = [await cache.answer("b", execute) for _ in range(3)]
        assert [(answer.status, hit) for answer, hit in found] == [
            ("timeout", False),
            ("error", False),
            ("error", True),
        ]

    asyncio.run(run())
    assert executed == ["ok", "None", "timeout", "error"]


def test_answer_that_is_evicted_while_equal_calls_wait_still_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_cache, "_ENTRIES", 1)

    async def run() -> list[bool]:
        cache, answered = ResultCache(), asyncio.Event()

        async def slow() -> ToolAnswer:
            await answered.wait()
            return ToolAnswer("text", "ok", 1.0, cached=False)

        async def fast() -> ToolAnswer:
            answered.set()
            return ToolAnswer("other", "ok", 1.0, cached=False)

        calls = [asyncio.create_task(cache.answer("a", slow)) for _ in range(2)]
        await asyncio.sleep(0)
        await cache.answer("b", fast)
        return [hit for _, hit in await asyncio.gather(*calls)]

    assert asyncio.run(run()) == [False, True]


def test_state_depends_on_all_programs_and_their_order() -> None:
    one, two = {"code": "a"}, {"code": "b"}
    digests = [history_digest(each) for each in ([], [one], [two], [one, two], [two, one], [one, one])]
    assert len(set(digests)) == len(digests)
