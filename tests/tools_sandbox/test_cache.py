"""The cache: it is bounded, executes equal calls once, and keeps a file that survives crashes and damage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from tools_sandbox.answers import Status, ToolAnswer, ToolResult
from tools_sandbox.client import SandboxClient
from tools_sandbox.config import CacheConfig, ConfigError
from tools_sandbox.service.cache import _APPLICATION_ID, AnswerCache, cache_key

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


class Counting:
    """An execution that counts its runs."""

    def __init__(self, status: Status = "ok", seconds: float = 0.0, *, negative: bool = False) -> None:
        self.runs, self.status, self.seconds, self.negative = 0, status, seconds, negative

    async def __call__(self) -> tuple[ToolResult, float]:
        self.runs += 1
        await asyncio.sleep(self.seconds)
        return ToolResult(self.status, f"run {self.runs}", self.negative), self.seconds


@settings(max_examples=25)
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.randoms())
def test_cache_key_ignores_argument_order(arguments: dict[str, Any], random: Any) -> None:
    items = list(arguments.items())
    random.shuffle(items)
    assert cache_key("t", "f", arguments) == cache_key("t", "f", dict(items))
    assert cache_key("t", "f", arguments) != cache_key("t", "g", arguments)


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(1, 4))
def test_memory_keeps_most_recently_used_answers(keys: list[int], bound: int) -> None:
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
        calls[0].cancel()  # the first caller may leave; the execution continues
        answers = await asyncio.gather(*calls[1:])
        assert execute.runs == 1
        assert {answer.text for answer in answers} == {"run 1"}
        assert all(answer.cached for answer in answers)
        assert (cache.counts.misses, cache.counts.joined, cache.counts.hit_share) == (1, 19, 0.95)

    asyncio.run(run())


def test_failures_are_not_cached_and_timeouts_not_shared() -> None:
    async def run() -> None:
        cache, fails = AnswerCache(CacheConfig()), Counting("error")
        await cache.answer("k", fails)
        await cache.answer("k", fails)
        assert fails.runs == 2
        late, patient = Counting("timeout", 0.05), Counting("ok")
        first, second = await asyncio.gather(cache.answer("j", late), cache.answer("j", patient))
        assert (first.status, second.status, second.cached) == ("timeout", "ok", False)

    asyncio.run(run())


def test_caller_of_shared_execution_keeps_own_deadline() -> None:
    async def run() -> None:
        cache, slow, proceed = AnswerCache(CacheConfig()), Counting(), asyncio.Event()

        async def execute() -> tuple[ToolResult, float]:
            await proceed.wait()
            return await slow()

        patient = asyncio.create_task(cache.answer("k", execute))
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await cache.answer("k", execute, deadline=asyncio.get_running_loop().time() + 0.05)
        assert not patient.done()
        proceed.set()
        assert ((await patient).text, slow.runs) == ("run 1", 1)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_failure_of_first_caller_is_not_shared() -> None:
    async def run() -> None:
        cache, impatient, patient = AnswerCache(CacheConfig()), Counting("timeout", 0.05), Counting(seconds=0.05)

        async def without_a_place() -> tuple[ToolResult, float]:
            await asyncio.sleep(0.05)
            raise RuntimeError("no place")

        for first in (impatient, without_a_place):
            key = str(first)
            calls = [cache.answer(key, first), *(cache.answer(key, patient, limit_s=1) for _ in range(10))]
            _, *answers = await asyncio.gather(*calls, return_exceptions=True)
            texts = {answer.text for answer in answers if isinstance(answer, ToolAnswer)}
            assert texts == {f"run {patient.runs}"}
            assert (await cache.answer(key, patient)).cached  # the result of the others is cached
        assert patient.runs == 2
        # Callers with the same time limit share the timeout: nothing runs again.
        equals = await asyncio.gather(*(cache.answer("e", impatient, limit_s=0.05) for _ in range(5)))
        assert ({answer.status for answer in equals}, impatient.runs) == ({"timeout"}, 2)

    asyncio.run(run())


def test_cache_file_survives_and_stays_bounded(tmp_path: Path) -> None:
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


def test_restarted_service_remembers_until_corpus_changes(start_service: Callable[..., Any], tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    config = {
        "search": {"sources": [{"path": str(corpus), "format": "jsonl"}]},
        "cache": {"sqlite_path": str(tmp_path / "answers.db")},
        "python": {"cache": True},
        "workers": 1,
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
        service.process.wait(60)
    assert seen == [("Page 1: alpha 1", False), ("Page 1: alpha 1", True), ("Page 1: alpha 2", False)]


def test_negative_results_expire() -> None:
    async def run() -> None:
        cache = AnswerCache(CacheConfig(negative_s=600.0))
        missing = Counting("error", negative=True)
        answers = [await cache.answer("k", missing) for _ in range(3)]
        assert [(answer.text, answer.cached) for answer in answers] == [
            ("run 1", False),
            ("run 1", True),
            ("run 1", True),
        ]
        cache = AnswerCache(CacheConfig(negative_s=0.1))
        await cache.answer("k", missing)
        await asyncio.sleep(0.15)
        assert (await cache.answer("k", missing)).text == "run 3"
        nothing = Counting("ok", negative=True)
        await cache.answer("n", nothing)
        await asyncio.sleep(0.15)
        await cache.answer("n", nothing)
        assert nothing.runs == 2

    asyncio.run(run())


def test_memory_is_bounded_by_bytes() -> None:
    async def run() -> None:
        cache = AnswerCache(CacheConfig(memory_mib=1))

        async def large() -> tuple[ToolResult, float]:
            return ToolResult("ok", "x" * 300_000), 0.0

        for key in range(10):
            await cache.answer(str(key), large)
        assert len(cache) == 3

    asyncio.run(run())


FILL = """
import asyncio, sys
from pathlib import Path
from tools_sandbox.answers import ToolResult
from tools_sandbox.service.cache import AnswerCache
from tools_sandbox.config import CacheConfig, ConfigError

async def main():
    cache = AnswerCache(CacheConfig(entries=1, sqlite_path=Path(sys.argv[1]), sqlite_mib=2))
    for key in range(int(sys.argv[2]), 10**9):
        async def execute():
            return ToolResult("ok", f"{key} " * 500), 0.0
        await cache.answer(str(key), execute)
        if cache.counts.file_errors:
            print("error", flush=True)
        if key % 20 == 0:
            print(key, flush=True)

asyncio.run(main())
"""


def test_shared_cache_file_survives_kill_and_keeps_size(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    for round_number in range(2):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", FILL, str(path), str(start + 1000 * round_number)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            )
            for start in (0, 1_000_000)
        ]
        for writer in writers:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(12)]
            assert "error\n" not in lines
        for writer in writers:
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = database.execute("SELECT status, text FROM results").fetchall()
    assert len(rows) > 100
    assert all(status == "ok" and len(set(json.loads(text).split())) == 1 for status, text in rows)
    assert path.stat().st_size < 3 << 20  # sqlite_mib plus the page that exceeded it

    async def read() -> bool:
        cache = AnswerCache(CacheConfig(sqlite_path=path))
        answer = await cache.answer("0", Counting("error"))
        cache.close()
        return answer.status in ("ok", "error")

    assert asyncio.run(read())


def test_full_disk_and_damaged_file_cost_no_answer(tmp_path: Path) -> None:
    async def run() -> None:
        cache = AnswerCache(CacheConfig(entries=1, sqlite_path=tmp_path / "c.db"))
        assert cache._file is not None
        # A limit on the file imitates a full disk; SQLite raises the same error.
        await asyncio.get_running_loop().run_in_executor(
            cache._file._thread,
            lambda: cache._file._database.execute("PRAGMA max_page_count=4"),  # type: ignore[union-attr]  # asserted above
        )

        async def large() -> tuple[ToolResult, float]:
            return ToolResult("ok", "x" * 100_000), 0.0

        for key in range(5):
            assert (await cache.answer(str(key), large)).status == "ok"
        assert cache.counts.file_errors == 5
        cache.close()

    asyncio.run(run())
    (tmp_path / "d.db").write_bytes(b"this is no database" * 1000)
    with pytest.raises(ConfigError, match="may be deleted"):
        AnswerCache(CacheConfig(sqlite_path=tmp_path / "d.db"))


def test_truncated_cache_file_costs_no_answer(tmp_path: Path) -> None:
    path, count = tmp_path / "c.db", 60

    def text(key: str) -> str:
        return f"answer of {key} " * 20

    async def ask() -> int:
        cache = AnswerCache(CacheConfig(sqlite_path=path))
        cached = 0
        for number in range(count):

            async def execute(key: str = str(number)) -> tuple[ToolResult, float]:
                return ToolResult("ok", text(key)), 0.0

            answer = await cache.answer(str(number), execute)
            assert (answer.status, answer.text) == ("ok", text(str(number)))
            cached += answer.cached
        cache.close()
        return cached

    assert asyncio.run(ask()) == 0
    whole = path.read_bytes()
    for size in (0, 50, 4096, 5000, 8192, len(whole) // 2, len(whole)):
        for each in tmp_path.glob("c.db*"):
            each.unlink()
        path.write_bytes(whole[:size])
        try:
            cached = asyncio.run(ask())
        except ConfigError as error:
            assert size not in (0, len(whole))
            assert "may be deleted" in str(error)
            assert "\n" not in str(error)
        else:
            assert (cached == count) == (size == len(whole))


def test_cache_file_of_other_version_is_reset(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE results (id INTEGER PRIMARY KEY, key TEXT UNIQUE, status TEXT, text TEXT)")
        database.execute("INSERT INTO results (key, status, text) VALUES ('k', 'ok', '\"old\"')")
        database.execute(f"PRAGMA application_id={_APPLICATION_ID}")
        database.execute("PRAGMA user_version=2")

    async def run() -> list[bool]:
        cached = []
        for _ in range(2):
            cache = AnswerCache(CacheConfig(sqlite_path=path))
            cached.append((await cache.answer("k", Counting())).cached)
            cache.close()
        return cached

    assert asyncio.run(run()) == [False, True]


@pytest.mark.parametrize("version", [0, 7])
def test_database_of_another_program_is_refused_and_unchanged(tmp_path: Path, version: int) -> None:
    path = tmp_path / "c.db"
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE results (mine TEXT)")
        database.execute(f"PRAGMA user_version={version}")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="a database of another program: name a new file"):
        AnswerCache(CacheConfig(sqlite_path=path))
    assert path.read_bytes() == before


def test_lone_surrogates_survive_cache_file(tmp_path: Path) -> None:
    async def run() -> None:
        async def odd() -> tuple[ToolResult, float]:
            return ToolResult("ok", "a\ud800\0b"), 0.0

        for cached in (False, True):
            cache = AnswerCache(CacheConfig(sqlite_path=tmp_path / "c.db"))
            answer = await cache.answer("k", odd)
            assert (answer.text, answer.cached) == ("a\ud800\0b", cached)
            cache.close()

    asyncio.run(run())
