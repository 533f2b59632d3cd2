"""Answers that need not be computed twice: an LRU in memory, optionally a SQLite file, and one flight a key."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tools_sandbox.answers import ToolAnswer
from tools_sandbox.config import CacheConfig, ConfigError


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


class AnswerFile:
    """A SQLite file of answers with status "ok"; oldest out first. All access through one thread of its own."""

    def __init__(self, path: Path, entries: int) -> None:
        self._entries = entries
        self._thread = ThreadPoolExecutor(1, "answer-file")
        try:
            self._database = self._thread.submit(self._open, path).result()
        except sqlite3.Error as error:
            self._thread.shutdown()
            raise ConfigError(f"cache.sqlite_path: {path}: {error}") from error

    @staticmethod
    def _open(path: Path) -> sqlite3.Connection:
        database = sqlite3.connect(path)
        database.execute("PRAGMA journal_mode=WAL")
        # A crash of the machine may lose the last answers, never the file.
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute("CREATE TABLE IF NOT EXISTS answers (id INTEGER PRIMARY KEY, key TEXT UNIQUE, text TEXT)")
        database.commit()
        return database

    async def get(self, key: str) -> str | None:
        """The text kept under a key."""

        def read() -> str | None:
            row = self._database.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
            return None if row is None else str(row[0])

        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    async def put(self, key: str, text: str) -> None:
        """Keep a text; the oldest entries beyond the bound go."""

        def write() -> None:
            with self._database:
                statement = "INSERT OR REPLACE INTO answers (key, text) VALUES (?, ?)"
                inserted = self._database.execute(statement, (key, text))
                # Ids only grow, so this bounds the number of rows without counting them.
                oldest = (inserted.lastrowid or 0) - self._entries
                self._database.execute("DELETE FROM answers WHERE id <= ?", (oldest,))

        await asyncio.get_running_loop().run_in_executor(self._thread, write)

    def close(self) -> None:
        """Write what is pending and close the file."""
        self._thread.submit(self._database.close).result()
        self._thread.shutdown()


class AnswerCache:
    """Answers by key. Only "ok" answers are kept: a failure may not repeat, and asking again is the way to know."""

    def __init__(self, config: CacheConfig) -> None:
        self._bound = config.entries
        self._memory: OrderedDict[str, str] = OrderedDict()
        self._file = None if config.sqlite_path is None else AnswerFile(config.sqlite_path, config.sqlite_entries)
        self._flights: dict[str, asyncio.Task[ToolAnswer]] = {}
        self.counts = CacheCounts()

    def __len__(self) -> int:
        return len(self._memory)

    async def answer(self, key: str, execute: Callable[[], Awaitable[ToolAnswer]]) -> ToolAnswer:
        """The kept answer, that of an equal call in flight, or that of `execute`.

        A caller that goes away does not take a shared flight with it.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        text = self._recall(key)
        if text is not None:
            self.counts.hits += 1
            return ToolAnswer(text, "ok", loop.time() - began, cached=True)
        if key not in self._flights:
            self._flights[key] = asyncio.create_task(self._fly(key, execute))
            return await asyncio.shield(self._flights[key])
        self.counts.joined += 1
        answer = await asyncio.shield(self._flights[key])
        # A timeout speaks of the other caller's patience, not of ours.
        return await execute() if answer.status == "timeout" else replace(answer, cached=True)

    async def _fly(self, key: str, execute: Callable[[], Awaitable[ToolAnswer]]) -> ToolAnswer:
        try:
            if self._file is not None and (text := await self._file.get(key)) is not None:
                self.counts.hits += 1
                self._remember(key, text)
                return ToolAnswer(text, "ok", 0.0, cached=True)
            self.counts.misses += 1
            answer = await execute()
            if answer.status == "ok":
                self._remember(key, answer.text)
                if self._file is not None:
                    await self._file.put(key, answer.text)
            return answer
        finally:
            del self._flights[key]

    def _recall(self, key: str) -> str | None:
        text = self._memory.get(key)
        if text is not None:
            self._memory.move_to_end(key)
        return text

    def _remember(self, key: str, text: str) -> None:
        self._memory[key] = text
        self._memory.move_to_end(key)
        while len(self._memory) > self._bound:
            self._memory.popitem(last=False)

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()
