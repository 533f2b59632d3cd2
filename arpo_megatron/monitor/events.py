"""What the trainer tells the terminal: an append-only JSONL file that the command line follows.

The ranks own no terminal (on a cluster they run elsewhere); they append events, and whoever wants to watch reads them.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arpo_megatron.errors import UserError


@dataclass(slots=True)
class EventLog:
    """Appends events to `path`; one JSON object a line with at least `time` (seconds since the epoch) and `kind`."""

    path: Path
    enabled: bool = True

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event. Disabled logs (ranks other than the leader) do nothing."""
        if not self.enabled:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), "kind": kind, **fields}) + "\n")


@contextmanager
def user_errors_told(path: Path) -> Iterator[None]:
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
