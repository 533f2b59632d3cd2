"""The answer of a tool call: the record that tools, cache, server and client share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

Status = Literal["ok", "error", "timeout", "refused"]
"""ok: the tool did its work. error: it ran and failed, or its arguments are wrong. timeout: its wall-clock or CPU time
was over. refused: this service does not offer the tool."""

Failure = Literal["none", "temporary", "lasting", "blocked"]
"""Whether the tool gave no result because a service, the network or a provider failed; the call is not the cause.
temporary: repeat the call. lasting: a repetition would fail, too, or might do twice what must be done once.
blocked: no call of the tool succeeds until its operator acts (a wrong key, an empty account, a cap of requests)."""


class ToolResult(NamedTuple):
    """The result of a tool's `run`."""

    status: Status
    text: str
    negative: bool = False
    """A result such as "no results" or "no such page", which stays true for a while. It is cached for a short time.
    An "error" that is not negative is never cached."""
    failure: Failure = "none"
    """Other than "none": `text` is no result of the call. A model must not be trained on it."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The answer of one tool call."""

    text: str
    """Text for the model, also if the call failed."""
    status: Status
    seconds: float
    """Wall time of the execution in seconds, without queueing. For a cached answer, the time of the look-up."""
    cached: bool
    """True if this call executed nothing: its answer came from the cache or from an equal call in flight."""
    failure: Failure = "none"
    """See `ToolResult.failure`; the status of a failure is "error"."""

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON-safe values; `failure` only if there is one."""
        fields = {"text": self.text, "status": self.status, "seconds": self.seconds, "cached": self.cached}
        return fields if self.failure == "none" else {**fields, "failure": self.failure}

    @classmethod
    def from_dict(cls, data: object) -> ToolAnswer:
        """Return the answer that `to_dict` has written. Raises ValueError if `data` is anything else."""
        if not isinstance(data, Mapping) or set(data) - {"failure"} != {"text", "status", "seconds", "cached"}:
            raise ValueError(f"not a tool answer: {str(data)[:200]}")
        failure = data.get("failure", "none")
        text, status, seconds, cached = data["text"], data["status"], data["seconds"], data["cached"]
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool) and math.isfinite(seconds)
        known = status in get_args(Status) and failure in get_args(Failure)
        if not (isinstance(text, str) and known and number and isinstance(cached, bool)):
            raise ValueError(f"not a tool answer: {str(data)[:200]}")
        return cls(text, cast(Status, status), float(seconds), cached, cast(Failure, failure))
