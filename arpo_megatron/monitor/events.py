"""What the trainer tells the terminal: an append-only JSONL file that the command line follows.

The ranks own no terminal (on a cluster they run elsewhere); they append events, and whoever wants to watch reads them.
"""

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        with suppress(OSError):  # a full disk, of which these lines would tell, must not end a run
            append_line(self.path, json.dumps({"time": round(time.time(), 3), "kind": kind, **fields}))


def append_line(path: Path, text: str) -> None:
    """Append a whole line or, where that raises OSError, nothing."""
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        data = text.encode() + b"\n"
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise


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
