"""What a tool call answers: the one record that tools, cache, server and client share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

Status = Literal["ok", "error", "timeout", "refused"]
"""ok: the tool did its work. error: it ran and failed, or its arguments are wrong. timeout: its time (wall or CPU)
was over. refused: this service does not offer the tool."""


class ToolResult(NamedTuple):
    """What a tool's `run` gives back."""

    status: Status
    text: str
    negative: bool = False
    """A finding of "nothing there" (no results, no such page) that is true for a while, so it may be cached shortly.
    An "error" that is not negative is asked again every time."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """One answer of one tool call."""

    text: str
    """What the model reads; also when the call failed."""
    status: Status
    seconds: float
    """Wall time of the execution in seconds, without waiting for a free place; of a cached answer, the look-up."""
    cached: bool
    """True if this call executed nothing: the answer came from the cache or from an equal call in flight."""

    def to_dict(self) -> dict[str, object]:
        """JSON-safe fields, in the order of the class."""
        return {"text": self.text, "status": self.status, "seconds": self.seconds, "cached": self.cached}

    @classmethod
    def from_dict(cls, data: object) -> ToolAnswer:
        """The inverse of `to_dict`. ValueError: a field is missing, unknown or of the wrong type."""
        if not isinstance(data, Mapping) or set(data) != {"text", "status", "seconds", "cached"}:
            raise ValueError(f"not a tool answer: {str(data)[:200]}")
        text, status, seconds, cached = data["text"], data["status"], data["seconds"], data["cached"]
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool) and math.isfinite(seconds)
        if not (isinstance(text, str) and status in get_args(Status) and number and isinstance(cached, bool)):
            raise ValueError(f"not a tool answer: {str(data)[:200]}")
        return cls(text, cast(Status, status), float(seconds), cached)
