"""A judge's replies in an SQLite file, keyed by model and question."""

import hashlib
import json
import sqlite3
import threading
from contextlib import suppress
from pathlib import Path

from arpo_megatron.errors import UserError
from arpo_megatron.rewards.judge.prompts import VERSION


class Replies:
    """A cache that may be used by several threads and processes.

    Args:
        path: the file, created with its directory if it is missing; None: nothing is kept.

    Raises:
        UserError: the file is not such a cache.
    """

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._database = sqlite3.connect(path, timeout=30.0, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path} is not a cache of a judge's replies ({error}): delete it") from None

    @staticmethod
    def key(model: str, system: str, user: str) -> str:
        """Return a digest of the model, the version of the prompts and the whole question."""
        return hashlib.sha256(json.dumps([VERSION, model, system, user]).encode()).hexdigest()

    def get(self, key: str) -> str | None:
        """Return the reply, or None if the question was not asked before."""
        with self._lock:
            if self._database is None:
                return None
            row = self._database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, reply: str) -> None:
        """Store a reply; a full disk costs only this entry."""
        with self._lock, suppress(sqlite3.OperationalError):
            if self._database is not None:
                self._database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))

    def close(self) -> None:
        """Close the database; replies that come later are not stored."""
        with self._lock:
            if self._database is not None:
                self._database.close()
            self._database = None
