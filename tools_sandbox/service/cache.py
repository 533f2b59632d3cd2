"""Answers that need not be computed twice: an LRU in memory, optionally a SQLite file, and one flight a key."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import sqlite3
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tools_sandbox.answers import ToolAnswer, ToolResult
from tools_sandbox.config import CacheConfig, ConfigError
from tools_sandbox.service.deduplication import SingleFlight, WorkCancelled

log = logging.getLogger("tools_sandbox")

_MIB = 1 << 20
_PAGE_BYTES = 4096
_LAYOUT = 2
"""Of the table, as the file's `user_version`; what is kept in another is dropped."""
_FILE_FAILS = (sqlite3.Error, ValueError, TypeError)
"""What a full disk and a damaged file raise: of the database, and of rows that are not what was written."""
_BUSY_S = 5.0
"""How long a service waits for another that is writing to the same file."""


def cache_key(tool: str, fingerprint: str, arguments: Mapping[str, object]) -> str:
    """Equal for equal calls, whatever the order of the arguments.

    fingerprint: what else the answer depends on (corpus, limits), so that a kept file cannot outlive its truth.
    """
    canonical = json.dumps([tool, fingerprint, arguments], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


@dataclass(slots=True)
class CacheCounts:
    """Calls of cacheable tools since the start: hits + joined + misses."""

    hits: int = 0
    """Answered from memory or file."""
    joined: int = 0
    """Waited for an equal call that was already in flight."""
    misses: int = 0
    """Executed."""
    file_errors: int = 0
    """Answers that could not be read from or written to the file; the calls went on without it."""

    @property
    def hit_share(self) -> float:
        """Calls that executed nothing, of all; 0 before the first."""
        return (self.hits + self.joined) / max(self.hits + self.joined + self.misses, 1)


@dataclass(frozen=True, slots=True)
class _Kept:
    result: ToolResult
    expires: float
    """Wall-clock time in seconds since the epoch; infinite for what stays true."""


class AnswerFile:
    """A SQLite file of results; oldest out first. All access of this process through one thread of its own.

    Several services of one machine may share a file; kill -9 at any time loses at most what was being written.
    """

    def __init__(self, path: Path, entries: int, megabytes: int) -> None:
        self._entries, self._pages = entries, megabytes * _MIB // _PAGE_BYTES
        self._thread = ThreadPoolExecutor(1, "answer-file")
        try:
            self._database = self._thread.submit(self._open, path).result()
        except _FILE_FAILS as error:
            self._thread.shutdown()
            said = " ".join(str(error).split())
            raise ConfigError(f"cache.sqlite_path: {path}: {said}; it may be deleted") from error

    @staticmethod
    def _open(path: Path) -> sqlite3.Connection:
        database = sqlite3.connect(path, timeout=_BUSY_S)
        database.execute(f"PRAGMA page_size={_PAGE_BYTES}")
        database.execute("PRAGMA journal_mode=WAL")
        # A crash of the machine may lose the last answers, never the file.
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute("PRAGMA journal_size_limit=16777216")
        database.execute("BEGIN IMMEDIATE")  # of services that open it at once, one makes the table
        if database.execute("PRAGMA user_version").fetchone()[0] != _LAYOUT:
            database.execute("DROP TABLE IF EXISTS results")
            database.execute(
                "CREATE TABLE results (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, status TEXT, text TEXT,"
                " expires REAL, digest BLOB)"
            )
            database.execute(f"PRAGMA user_version={_LAYOUT}")
        database.commit()
        return database

    async def get(self, key: str) -> _Kept | None:
        """What is kept under a key and has not expired. One of `_FILE_FAILS`: the file, or this row, is damaged."""

        def read() -> _Kept | None:
            statement = "SELECT status, text, expires, digest FROM results WHERE key = ? AND expires > ?"
            row = self._database.execute(statement, (key, time.time())).fetchone()
            if row is None:
                return None
            *content, digest = row
            if _digest(key, *content) != digest:
                raise ValueError("a row is not what was written")
            status, text, expires = content
            return _Kept(ToolResult(status, json.loads(text)), expires)

        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    async def put(self, key: str, kept: _Kept) -> None:
        """Keep a result; the oldest beyond the bounds go. One of `_FILE_FAILS`: the file cannot be written."""

        def write() -> None:
            with self._database:
                statement = "INSERT OR REPLACE INTO results (key, status, text, expires, digest) VALUES (?, ?, ?, ?, ?)"
                # JSON, since text of a model may hold lone surrogates, which SQLite's UTF-8 cannot.
                row = (key, kept.result.status, json.dumps(kept.result.text), kept.expires)
                inserted = self._database.execute(statement, (*row, _digest(*row)))
                # Ids only grow, so this bounds the number of rows without counting them.
                oldest = (inserted.lastrowid or 0) - self._entries
                self._database.execute("DELETE FROM results WHERE id <= ?", (oldest,))
                if self._used_pages() > self._pages:
                    # A sixteenth at a time: deleted pages are used again by what comes.
                    self._database.execute(
                        "DELETE FROM results WHERE id IN (SELECT id FROM results ORDER BY id LIMIT"
                        " (SELECT 1 + count(*) / 16 FROM results))"
                    )

        await asyncio.get_running_loop().run_in_executor(self._thread, write)

    def _used_pages(self) -> int:
        pages, free = (
            self._database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count")
        )
        return int(pages) - int(free)

    def close(self) -> None:
        """Write what is pending and close the file."""
        with contextlib.suppress(*_FILE_FAILS):
            self._thread.submit(self._database.close).result()
        self._thread.shutdown()


def _digest(key: str, status: str, text: str, expires: float) -> bytes:
    """Of a row: bytes that a disk or another program changed are no answer."""
    return hashlib.sha256(json.dumps([key, status, text, expires]).encode("ascii")).digest()


class AnswerCache:
    """Results by key: "ok" ones for good, negative ones for `negative_s`, other failures never (asking again tells)."""

    def __init__(self, config: CacheConfig) -> None:
        self._entries, self._bytes_allowed = config.entries, config.memory_mb * _MIB
        self._negative_s = config.negative_s
        self._bytes = 0
        self._memory: OrderedDict[str, _Kept] = OrderedDict()
        self._file = (
            None
            if config.sqlite_path is None
            else AnswerFile(config.sqlite_path, config.sqlite_entries, config.sqlite_mb)
        )
        self._flights: SingleFlight[ToolAnswer] = SingleFlight()
        self.counts = CacheCounts()

    def __len__(self) -> int:
        return len(self._memory)

    async def answer(
        self,
        key: str,
        execute: Callable[[], Awaitable[tuple[ToolResult, float]]],
        *,
        limit_s: float = math.inf,
        deadline: float = math.inf,
    ) -> ToolAnswer:
        """The kept answer, that of an equal call in flight, or that of `execute` (a result and its seconds).

        A caller that goes away does not take a shared flight with it; the last one does. What befell another caller
        (no place, its deadline, a time limit shorter than our `limit_s`) is not ours: the call is made again.
        TimeoutError: the deadline (event loop's clock) passed while an equal call was in flight.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            if (kept := self._recall(key)) is not None:
                self.counts.hits += 1
                return ToolAnswer(kept.result.text, kept.result.status, loop.time() - began, cached=True)
            if key not in self._flights:
                return await self._flights.join(key, lambda: self._fly(key, execute))
            self.counts.joined += 1
            async with asyncio.timeout_at(deadline if deadline < math.inf else None):
                answer = await self._others_answer(key)
            if answer is not None and (answer.status != "timeout" or answer.seconds >= limit_s):
                return replace(answer, cached=True)
            self.counts.joined -= 1

    async def _others_answer(self, key: str) -> ToolAnswer | None:
        """The answer of the flight under way; none if its caller got none."""

        async def unused() -> ToolAnswer:
            raise AssertionError("a flight is under way")

        try:
            return await self._flights.join(key, unused)
        except WorkCancelled:
            raise
        except Exception:  # its own caller is told
            return None

    async def _fly(self, key: str, execute: Callable[[], Awaitable[tuple[ToolResult, float]]]) -> ToolAnswer:
        if (kept := await self._read_file(key)) is not None:
            self.counts.hits += 1
            self._remember(key, kept)
            return ToolAnswer(kept.result.text, kept.result.status, 0.0, cached=True)
        self.counts.misses += 1
        result, seconds = await execute()
        if result.negative or result.status == "ok":
            kept = _Kept(result, time.time() + self._negative_s if result.negative else float("inf"))
            self._remember(key, kept)
            await self._write_file(key, kept)
        return ToolAnswer(result.text, result.status, seconds, cached=False)

    async def _read_file(self, key: str) -> _Kept | None:
        if self._file is None:
            return None
        try:
            return await self._file.get(key)
        except _FILE_FAILS as error:
            self._note_file_error("read", error)
            return None

    async def _write_file(self, key: str, kept: _Kept) -> None:
        if self._file is None:
            return
        try:
            await self._file.put(key, kept)
        except _FILE_FAILS as error:
            self._note_file_error("written", error)

    def _note_file_error(self, what: str, error: Exception) -> None:
        self.counts.file_errors += 1
        # At the 1st, 2nd, 4th, 8th: a full disk must not fill the log too.
        if self.counts.file_errors & (self.counts.file_errors - 1) == 0:
            log.warning("the cache file cannot be %s (error %d): %s", what, self.counts.file_errors, error)

    def _recall(self, key: str) -> _Kept | None:
        kept = self._memory.get(key)
        if kept is None or kept.expires <= time.time():
            return None
        self._memory.move_to_end(key)
        return kept

    def _remember(self, key: str, kept: _Kept) -> None:
        if (before := self._memory.pop(key, None)) is not None:
            self._bytes -= sys.getsizeof(before.result.text)
        self._memory[key] = kept
        self._bytes += sys.getsizeof(kept.result.text)
        while len(self._memory) > self._entries or self._bytes > self._bytes_allowed:
            _, oldest = self._memory.popitem(last=False)
            self._bytes -= sys.getsizeof(oldest.result.text)

    async def cancel(self) -> None:
        """End every execution in flight."""
        await self._flights.cancel()

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()
