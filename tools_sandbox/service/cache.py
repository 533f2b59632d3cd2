"""The cache of answers: an LRU in memory, an optional SQLite file, and one execution per key at a time."""

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
from tools_sandbox.utils.logs import is_logged

log = logging.getLogger("tools_sandbox")

_MIB = 1 << 20
_PAGE_BYTES = 4096
_SCHEMA_VERSION = 3
"""Version of the table, stored as the file's `user_version`. The table of another version is dropped."""
_APPLICATION_ID = 0x4152504F
"""Marks a file as ours (PRAGMA application_id): a database of another program is never changed."""
_BUSY_S = 5.0
"""Seconds that a service waits for another one that is writing to the same file."""


def cache_key(tool: str, fingerprint: str, arguments: Mapping[str, object]) -> str:
    """Return a key that is equal for equal calls, whatever the order of their arguments.

    fingerprint: everything else that the answer depends on (corpus, limits), so that no outdated answer is found.
    """
    canonical = json.dumps([tool, fingerprint, arguments], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


@dataclass(slots=True)
class CacheCounts:
    """Calls of cacheable tools since the start: hits + joined + misses."""

    hits: int = 0
    """Calls answered from memory or file."""
    joined: int = 0
    """Calls that waited for an equal call in flight."""
    misses: int = 0
    """Calls that were executed."""
    file_errors: int = 0
    """Failed reads and writes of the file. The calls continued without it."""

    @property
    def hit_share(self) -> float:
        """Return the share of calls that executed nothing; 0 before the first call."""
        return (self.hits + self.joined) / max(self.hits + self.joined + self.misses, 1)


@dataclass(frozen=True, slots=True)
class _Entry:
    result: ToolResult
    expires: float
    """Expiry in seconds since the epoch; infinite for results that stay true."""


class AnswerFile:
    """A SQLite file of results. The oldest ones are removed first. Only one thread of this process accesses it.

    Several services on one machine may share a file. A kill -9 loses at most the write in progress.
    """

    def __init__(self, path: Path, entries: int, limit_mib: int) -> None:
        self._entries, self._pages = entries, limit_mib * _MIB // _PAGE_BYTES
        self._thread = ThreadPoolExecutor(1, "answer-file")
        try:
            self._database = self._thread.submit(self._open, path).result()
        except ConfigError:
            self._thread.shutdown()
            raise
        except sqlite3.Error as error:
            self._thread.shutdown()
            reason = " ".join(str(error).split())
            raise ConfigError(f"cache.sqlite_path: {path}: {reason}; it may be deleted") from error

    @staticmethod
    def _open(path: Path) -> sqlite3.Connection:
        database = sqlite3.connect(path, timeout=_BUSY_S)
        program, tables = database.execute(
            "SELECT application_id, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id"
        ).fetchone()
        if tables and program != _APPLICATION_ID:
            raise ConfigError(f"cache.sqlite_path: {path} is a database of another program: name a new file")
        database.execute(f"PRAGMA page_size={_PAGE_BYTES}")
        database.execute("PRAGMA journal_mode=WAL")
        # After a crash of the machine the last answers may be lost, but the file stays valid.
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute("PRAGMA journal_size_limit=16777216")
        database.execute("BEGIN IMMEDIATE")  # if several services open it at once, one creates the table
        if database.execute("PRAGMA user_version").fetchone()[0] != _SCHEMA_VERSION:
            database.execute("DROP TABLE IF EXISTS results")
            database.execute(
                "CREATE TABLE results (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, status TEXT, text TEXT,"
                " expires REAL)"
            )
            database.execute(f"PRAGMA application_id={_APPLICATION_ID}")
            database.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
        database.commit()
        return database

    async def get(self, key: str) -> _Entry | None:
        """Return the entry of a key unless it has expired. Raises sqlite3.Error for a damaged file."""

        def read() -> _Entry | None:
            statement = "SELECT status, text, expires FROM results WHERE key = ? AND expires > ?"
            row = self._database.execute(statement, (key, time.time())).fetchone()
            return None if row is None else _Entry(ToolResult(row[0], json.loads(row[1])), row[2])

        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    async def put(self, key: str, entry: _Entry) -> None:
        """Store a result and remove the oldest ones beyond the bounds. Raises sqlite3.Error."""

        def write() -> None:
            with self._database:
                statement = "INSERT OR REPLACE INTO results (key, status, text, expires) VALUES (?, ?, ?, ?)"
                # As JSON: a model's text may hold lone surrogates, which SQLite's UTF-8 cannot represent.
                row = (key, entry.result.status, json.dumps(entry.result.text), entry.expires)
                inserted = self._database.execute(statement, row)
                # Ids only grow, so this bounds the number of rows without counting them.
                oldest = (inserted.lastrowid or 0) - self._entries
                self._database.execute("DELETE FROM results WHERE id <= ?", (oldest,))
                if self._used_pages() > self._pages:
                    # A sixteenth at a time. SQLite reuses the deleted pages.
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
        """Finish pending writes and close the file."""
        with contextlib.suppress(sqlite3.Error):
            self._thread.submit(self._database.close).result()
        self._thread.shutdown()


class AnswerCache:
    """Results by key. "ok" results are kept for good, negative ones for `negative_s`, other failures never."""

    def __init__(self, config: CacheConfig) -> None:
        self._entries, self._bytes_allowed = config.entries, config.memory_mib * _MIB
        self._negative_s = config.negative_s
        self._bytes = 0
        self._memory: OrderedDict[str, _Entry] = OrderedDict()
        self._file = (
            None
            if config.sqlite_path is None
            else AnswerFile(config.sqlite_path, config.sqlite_entries, config.sqlite_mib)
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
        """Return the cached answer, that of an equal call in flight, or that of `execute` (a result and its seconds).

        A shared execution continues until its last caller has gone. If the execution fails for a reason that concerns
        only the caller that began it (no slot, its deadline, a time limit shorter than our `limit_s`), it is repeated.
        Raises TimeoutError if the deadline (event loop's clock) passes while an equal call is in flight.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            if (entry := self._recall(key)) is not None:
                self.counts.hits += 1
                return ToolAnswer(entry.result.text, entry.result.status, loop.time() - began, cached=True)
            if key not in self._flights:
                return await self._flights.join(key, lambda: self._find_or_execute(key, execute))
            self.counts.joined += 1
            async with asyncio.timeout_at(deadline if deadline < math.inf else None):
                answer = await self._join_other(key)
            if answer is not None and (answer.status != "timeout" or answer.seconds >= limit_s):
                return replace(answer, cached=True)
            self.counts.joined -= 1

    async def _join_other(self, key: str) -> ToolAnswer | None:
        """Return the answer of the execution in flight; None if the caller that began it got none."""

        async def unused() -> ToolAnswer:
            raise AssertionError("an execution is in flight")

        try:
            return await self._flights.join(key, unused)
        except WorkCancelled:
            raise
        except Exception:  # reported to its own caller
            return None

    async def _find_or_execute(
        self, key: str, execute: Callable[[], Awaitable[tuple[ToolResult, float]]]
    ) -> ToolAnswer:
        if (entry := await self._read_file(key)) is not None:
            self.counts.hits += 1
            self._remember(key, entry)
            return ToolAnswer(entry.result.text, entry.result.status, 0.0, cached=True)
        self.counts.misses += 1
        result, seconds = await execute()
        if result.negative or result.status == "ok":
            entry = _Entry(result, time.time() + self._negative_s if result.negative else float("inf"))
            self._remember(key, entry)
            await self._write_file(key, entry)
        return ToolAnswer(result.text, result.status, seconds, cached=False, failure=result.failure)

    async def _read_file(self, key: str) -> _Entry | None:
        if self._file is None:
            return None
        try:
            return await self._file.get(key)
        except sqlite3.Error as error:
            self._note_file_error("read", error)
            return None

    async def _write_file(self, key: str, entry: _Entry) -> None:
        if self._file is None:
            return
        try:
            await self._file.put(key, entry)
        except sqlite3.Error as error:
            self._note_file_error("written", error)

    def _note_file_error(self, action: str, error: Exception) -> None:
        self.counts.file_errors += 1
        if is_logged(self.counts.file_errors):  # a full disk must not flood the log
            log.warning("the cache file cannot be %s (error %d): %s", action, self.counts.file_errors, error)

    def _recall(self, key: str) -> _Entry | None:
        entry = self._memory.get(key)
        if entry is None or entry.expires <= time.time():
            return None
        self._memory.move_to_end(key)
        return entry

    def _remember(self, key: str, entry: _Entry) -> None:
        if (before := self._memory.pop(key, None)) is not None:
            self._bytes -= sys.getsizeof(before.result.text)
        self._memory[key] = entry
        self._bytes += sys.getsizeof(entry.result.text)
        while len(self._memory) > self._entries or self._bytes > self._bytes_allowed:
            _, oldest = self._memory.popitem(last=False)
            self._bytes -= sys.getsizeof(oldest.result.text)

    async def cancel(self) -> None:
        await self._flights.cancel()

    def close(self) -> None:
        """Close the SQLite file, if there is one."""
        if self._file is not None:
            self._file.close()
