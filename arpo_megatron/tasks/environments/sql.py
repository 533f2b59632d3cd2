"""Questions about an SQLite database that the model may also change: an environment with snapshots."""

import re
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from arpo_megatron.tasks.base import Message, Task
from arpo_megatron.tasks.environments.base import Step, plain

_SYSTEM = (
    "Answer the question about an SQLite database. In each turn write one SQL statement between <sql> and </sql>; its "
    "rows or its error follow. When you know the answer, write it between <answer> and </answer>.\nThe tables:\n"
)
_SQL = re.compile(r"<sql>(.*?)</sql>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_STEPS = 1_000_000
"""Instructions of SQLite's virtual machine that a statement may take."""
_PROGRESS = 10_000
_LONGEST_S = 10.0
"""Time limit of a statement: a few instructions can sort or write many MiB."""
_CHARS_PER_CELL = 200
_MAX_BYTES, _MAX_CELL_BYTES = 64 << 20, 100_000
_REFUSED = {
    getattr(sqlite3, f"SQLITE_{action}")
    for action in ["ATTACH", "DETACH", "PRAGMA", "TRANSACTION", "SAVEPOINT"]
    + [f"{verb}_TEMP_{kind}" for verb in ("CREATE", "DROP") for kind in ("INDEX", "TABLE", "TRIGGER", "VIEW")]
}
"""Actions that reach other files, change settings, or make a state that is not in the database, nor in a snapshot."""
_REFUSED_FUNCTIONS = ("changes", "last_insert_rowid", "total_changes")
"""Functions of the connection's state, which no snapshot has."""


@dataclass(slots=True)
class SqlDatabase:
    """A database in memory. `script` creates it; a task asks about it, and its ground truth is the expected answer.

    The reward is `correct` (1 or 0) of the answer, and `error_penalty` for each statement that fails.
    """

    script: str = ""
    """SQL statements that create and fill the tables."""
    error_penalty: float = 0.0
    """Part of the reward for a statement that fails; not positive."""
    max_rows: int = 20
    """Rows of a result that the model reads."""
    replayable: bool = False
    """False: a statement may call random()."""
    _answers: frozenset[str] = field(default=frozenset(), init=False)
    _database: sqlite3.Connection | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.error_penalty > 0:
            raise ValueError("it must not be positive")
        try:
            with _opened() as database:
                database.executescript(self.script)
        except sqlite3.Error as error:
            raise ValueError(f"script: {error}") from None

    def reset(self, task: Task) -> Sequence[Message]:
        """Create the database; return its schema and the question."""
        self.close()
        self._answers, self._database = frozenset(map(plain, task.answers)), _opened()
        self._database.executescript(self.script)
        # A restored database counts its changes in its header, a new one in memory does not. So every one is restored:
        # equal statements then give equal snapshots.
        self._database.deserialize(self._database.serialize())
        _bound(self._database)
        _restrict(self._database)
        tables = self._database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        schema = "\n".join(statement for (statement,) in tables)
        return [{"role": "system", "content": _SYSTEM + schema}, task.messages[-1]]

    def step(self, action: str) -> Step:
        """Execute the statement, or score the answer."""
        if (answer := _ANSWER.search(action)) is not None:
            right = plain(answer[1]) in self._answers
            return Step("", done=True, rewards={"correct": float(right)})
        statement = _SQL.search(action)
        if statement is None:
            return self._failed("write a statement between <sql> and </sql>, or an <answer>")
        assert self._database is not None
        left, end_s = _STEPS // _PROGRESS, time.monotonic() + _LONGEST_S

        def out_of_steps() -> bool:
            nonlocal left
            left -= 1
            return left < 0 or time.monotonic() > end_s

        self._database.set_progress_handler(out_of_steps, _PROGRESS)
        try:
            cursor = self._database.execute(statement[1])
            rows = cursor.fetchmany(self.max_rows + 1)
        except (sqlite3.Error, sqlite3.Warning) as error:
            return self._failed(str(error))
        lines = [" | ".join(str(cell)[:_CHARS_PER_CELL] for cell in row) for row in rows[: self.max_rows]]
        more = [f"(the first {self.max_rows} rows)"] if len(rows) > self.max_rows else []
        return Step("\n".join([*lines, *more]) if lines else f"no rows; {max(cursor.rowcount, 0)} rows changed")

    def _failed(self, reason: str) -> Step:
        return Step(f"Error: {reason}", rewards={"error": self.error_penalty})

    def snapshot(self) -> bytes:
        assert self._database is not None
        self._database.set_authorizer(None)  # SQLite reads the file with a PRAGMA
        state = self._database.serialize()
        _restrict(self._database)
        return state

    def restore(self, state: bytes) -> None:
        assert self._database is not None
        self._database.set_authorizer(None)
        self._database.deserialize(state)
        _bound(self._database)
        _restrict(self._database)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _opened() -> sqlite3.Connection:
    # No transactions: each statement counts at once. Calls come from several threads, one at a time.
    return sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)


def _bound(database: sqlite3.Connection) -> None:
    (page_bytes,) = database.execute("PRAGMA page_size").fetchone()
    database.execute(f"PRAGMA max_page_count={_MAX_BYTES // page_bytes}")


def _restrict(database: sqlite3.Connection) -> None:
    """Refuse statements that do more than read and change the database."""

    def allowed(action: int, _first: str | None, second: str | None, *_names: object) -> int:
        refused = action in _REFUSED or (action == sqlite3.SQLITE_FUNCTION and second in _REFUSED_FUNCTIONS)
        return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK

    database.set_authorizer(allowed)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_CELL_BYTES)
