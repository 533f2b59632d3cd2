"""What the trainer tells the terminal: an append-only JSONL file that the command line follows.

The ranks own no terminal (on a cluster they run elsewhere); they append events, and whoever wants to watch reads them.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.utils.atomic import append_lines

_RESERVED_BYTES = 2**20
"""Of the disk, kept for lines to come: those that say that it is full must find room, and be read at once."""


@dataclass(slots=True)
class EventLog:
    """Appends events to `path`; one JSON object a line with at least `time` (seconds since the epoch) and `kind`.

    A full disk does not silence it: it has room of its own there (`_RESERVED_BYTES`), where the file system can keep
    some. What finds none waits in memory and is written with the next event for which there is room.
    """

    path: Path
    enabled: bool = True
    _waiting: list[str] = field(default_factory=list, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event. Disabled logs (ranks other than the leader) do nothing."""
        if not self.enabled:
            return
        line = json.dumps({"time": round(time.time(), 3), "kind": kind, **fields})
        with self._lock, suppress(OSError):  # a full disk, of which these lines tell, must not end a run
            self._waiting.append(line)
            append_lines(self.path, self._waiting, reserved=_RESERVED_BYTES)


@contextmanager
def log_user_errors(path: Path) -> Iterator[None]:
    """A `UserError` inside becomes an event too: the command line says its one line instead of showing a traceback."""
    try:
        yield
    except UserError as error:
        EventLog(path).emit("user_error", text=str(error))
        raise


@dataclass(slots=True)
class EventReader:
    """Reads the events appended to `path` since it was made or last asked; half-written lines wait for their end."""

    path: Path
    offset: int = 0

    def __post_init__(self) -> None:
        if self.path.exists():
            self.offset = self.path.stat().st_size

    def new(self) -> list[dict[str, Any]]:
        """Events since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
