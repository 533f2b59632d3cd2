"""The cache: bounded, one flight a key, and a file that outlives the process but not its truth."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
from hypothesis import given
from hypothesis import strategies as st

from tools_sandbox.answers import Status, ToolResult
from tools_sandbox.cache import AnswerCache, cache_key
from tools_sandbox.client import SandboxClient
from tools_sandbox.config import CacheConfig

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


class Counting:
    """An execution that counts itself."""

    def __init__(self, status: Status = "ok", seconds: float = 0.0, *, negative: bool = False) -> None:
        self.runs, self.status, self.seconds, self.negative = 0, status, seconds, negative

    async def __call__(self) -> tuple[ToolResult, float]:
        self.runs += 1
        await asyncio.sleep(self.seconds)
        return ToolResult(self.status, f"run {self.runs}", self.negative), self.seconds


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.randoms())
def test_a_key_does_not_depend_on_the_order_of_arguments(arguments: dict[str, Any], random: Any) -> None:
    items = list(arguments.items())
    random.shuffle(items)
    assert cache_key("t", "f", arguments) == cache_key("t", "f", dict(items))
    assert cache_key("t", "f", arguments) != cache_key("t", "g", arguments)


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(1, 4))
def test_memory_keeps_the_most_recently_used(keys: list[int], bound: int) -> None:
    async def run() -> None:
        cache = AnswerCache(CacheConfig(entries=bound))
        recent: list[int] = []
        for key in keys:
            answer = await cache.answer(str(key), Counting())
            assert answer.cached == (key in recent)
            recent = [key, *(other for other in recent if other != key)][:bound]
            assert len(cache) == len(recent)
        assert cache.counts.hits + cache.counts.misses == len(keys)

    asyncio.run(run())


def test_equal_calls_in_flight_execute_once() -> None:
    async def run() -> None:
        cache, execute = AnswerCache(CacheConfig()), Counting(seconds=0.05)
        calls = [asyncio.create_task(cache.answer("k", execute)) for _ in range(20)]
        await asyncio.sleep(0.01)
        calls[0].cancel()  # who came first may leave; the flight goes on
        answers = await asyncio.gather(*calls[1:])
        assert execute.runs == 1
        assert {answer.text for answer in answers} == {"run 1"}
        assert all(answer.cached for answer in answers)
        assert (cache.counts.misses, cache.counts.joined) == (1, 19)

    asyncio.run(run())


def test_failures_are_not_kept_and_a_timeout_is_not_shared() -> None:
    async def run() -> None:
        cache, fails = AnswerCache(CacheConfig()), Counting("error")
        await cache.answer("k", fails)
        await cache.answer("k", fails)
        assert fails.runs == 2
        late, patient = Counting("timeout", 0.05), Counting("ok")
        first, second = await asyncio.gather(cache.answer("j", late), cache.answer("j", patient))
        assert (first.status, second.status, second.cached) == ("timeout", "ok", False)

    asyncio.run(run())


def test_the_file_survives_and_stays_bounded(tmp_path: Path) -> None:
    config = CacheConfig(entries=2, sqlite_path=tmp_path / "c.db", sqlite_entries=5)

    async def fill() -> None:
        cache = AnswerCache(config)
        for key in range(10):
            await cache.answer(str(key), Counting())
        cache.close()

    async def read() -> list[bool]:
        cache = AnswerCache(config)
        cached = [(await cache.answer(str(key), Counting("error"))).cached for key in range(10)]
        cache.close()
        return cached

    asyncio.run(fill())
    assert asyncio.run(read()) == [False] * 5 + [True] * 5


def test_a_restarted_service_remembers_until_its_corpus_changes(
    start_service: Callable[..., Any], tmp_path: Path
) -> None:
    corpus = tmp_path / "c.jsonl"
    config = {
        "search": {"sources": [{"path": str(corpus), "format": "jsonl"}]},
        "cache": {"sqlite_path": str(tmp_path / "answers.db")},
        "python": {"cache": True},
    }
    seen = []
    for text in ("alpha 1", "alpha 1", "alpha 2"):
        corpus.write_text(f'{{"text": "{text}"}}\n')
        service = start_service(config)
        with SandboxClient(service.url) as client:
            answer = client.call("search", {"query": "alpha"})
            seen.append((answer.text, answer.cached))
            clock = {"code": "import time; time.time_ns()"}
            assert client.call("python", clock).text == client.call("python", clock).text
        counts = requests.get(f"{service.url}/health", timeout=5).json()["cache"]
        assert counts["hits"] >= 1
        service.process.terminate()
        service.process.wait(5)
    assert seen == [("Page 1: alpha 1", False), ("Page 1: alpha 1", True), ("Page 1: alpha 2", False)]
