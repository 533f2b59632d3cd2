"""What service and supervisor say to each other: one request, one outcome, over one socket a call.

Each is a header (two lengths), a JSON object, and the state of a session as it is, which the service never opens.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, replace

from tools_sandbox.python_tool.walls import WorkerLimits

HEADER = struct.Struct("!IQ")
"""Bytes of the JSON object, bytes of the state."""

PLACE = struct.Struct("!I")
"""What the service says to the zygote, beside the call's socket: the call's place, see `isolation.enter_supervisor`."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that keep numerical libraries from starting a thread for every core in every call."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call."""

    code: str
    time_s: float
    """Wall-clock limit in seconds."""
    output_chars: int
    """Longest answer in characters."""
    output_mb: int
    """Most output in MiB before the call is ended."""
    limits: WorkerLimits
    state_mb: int = 0
    """Largest state to return in MiB; 0: none is wanted."""
    state: bytes = b""
    """The state to begin with; empty: none."""

    def encode(self) -> bytes:
        """The whole message."""
        return _encode(asdict(replace(self, state=b"")), self.state)

    @classmethod
    def decode(cls, body: bytes, state: bytes) -> Request:
        """From the parts behind the header."""
        data = json.loads(body)
        return cls(**{**data, "limits": WorkerLimits(**data["limits"]), "state": state})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call."""

    status: str
    """"ok", "error" or "timeout", as in `ToolAnswer`; "broken": the sandbox itself failed, `text` says why."""
    text: str
    state: bytes = b""
    """The state after the call, if it was wanted and there is one."""

    def encode(self) -> bytes:
        """The whole message."""
        return _encode({"status": self.status, "text": self.text}, self.state)

    @classmethod
    def decode(cls, message: bytes) -> Outcome:
        """ValueError: the supervisor ended before it wrote an outcome."""
        if len(message) < HEADER.size:
            raise ValueError("the supervisor of the call ended without an outcome")
        body_bytes, state_bytes = HEADER.unpack_from(message)
        if len(message) != HEADER.size + body_bytes + state_bytes:
            raise ValueError("the supervisor of the call ended while it wrote the outcome")
        data = json.loads(message[HEADER.size : HEADER.size + body_bytes])
        return cls(data["status"], data["text"], message[HEADER.size + body_bytes :])


def _encode(data: dict[str, object], state: bytes) -> bytes:
    # ASCII escapes also carry lone surrogates, which a model can write and UTF-8 cannot.
    data.pop("state", None)
    body = json.dumps(data).encode("ascii")
    return HEADER.pack(len(body), len(state)) + body + state
