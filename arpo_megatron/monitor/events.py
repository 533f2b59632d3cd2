"""Events: an append-only JSONL file through which the ranks of a job reach the terminal.

The ranks own no terminal: on a cluster they run on other machines. They append events, and the command line follows
the file.
"""

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.utils.atomic import append_line
from arpo_megatron.utils.json_lines import json_lines
from arpo_megatron.utils.regular_files import read_regular


@dataclass(slots=True)
class EventLog:
    """Appends events to a file, one JSON object per line with at least `time` (seconds since the epoch) and `kind`."""

    path: Path
    enabled: bool = True
    """False on ranks other than the controller's: `emit` then does nothing."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event, with null for NaN and infinities. One that the disk refuses is lost: it ends no run."""
        if not self.enabled:
            return
        lost = {name: None for name, value in fields.items() if isinstance(value, float) and not math.isfinite(value)}
        line = json.dumps({"time": round(time.time(), 3), "kind": kind, **fields, **lost})
        with self._lock, suppress(OSError):
            append_line(self.path, line)


@contextmanager
def log_user_errors(path: Path) -> Iterator[None]:
    """Record a `UserError` as an event, so that the command line shows its one line instead of a traceback."""
    try:
        yield
    except UserError as error:
        EventLog(path).emit("user_error", text=str(error))
        raise


@dataclass(slots=True)
class EventReader:
    """Reads the events appended to a file since the reader was created or last used; half-written lines are left."""

    path: Path
    offset: int = 0

    def __post_init__(self) -> None:
        if self.path.exists():
            self.offset = self.path.stat().st_size

    def new(self) -> list[dict[str, Any]]:
        """Return the events since the last call, without damaged lines."""
        try:
            data = read_regular(self.path, self.offset)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [row for _, row in json_lines(whole) if row is not None]
