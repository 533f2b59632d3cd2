"""What service and supervisor say to each other: one request, one outcome, over one socket a call.

Each is a header (two lengths), a JSON object, and the state of a session as it is, which the service never opens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

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
    state_mb: int = 0
    """Largest state to return in MiB; 0: none is wanted."""
    state: bytes | bytearray = b""
    """The state to begin with; empty: none."""

    def encode(self) -> bytes:
        """The whole message."""
        return _encode(asdict(self))

    @classmethod
    def decode(cls, head: bytes | bytearray, state: bytes | bytearray = b"") -> Request:
        """From its parts, see `read_head`."""
        return cls(**json.loads(head[HEADER.size :]), state=state)


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
        return _encode(asdict(self))

    @classmethod
    def decode(cls, message: bytes) -> Outcome:
        """ValueError: the supervisor ended before it wrote an outcome."""
        if len(message) < HEADER.size:
            raise ValueError("the supervisor of the call ended without an outcome")
        if len(message) != HEADER.size + sum(HEADER.unpack_from(message)):
            raise ValueError("the supervisor of the call ended while it wrote the outcome")
        end = HEADER.size + HEADER.unpack_from(message)[0]
        return cls(**json.loads(message[HEADER.size : end]), state=message[end:])


Read = Callable[[int], bytes]
"""So many bytes at most, nothing at the end of the stream, like `socket.recv`."""


def read_head(read: Read) -> tuple[bytearray, int] | None:
    """The next message up to its state, and how many bytes that has; none where the stream ends before."""
    head = read_exactly(read, HEADER.size)
    if len(head) < HEADER.size:
        return None
    body_bytes, state_bytes = HEADER.unpack(head)
    head += read_exactly(read, body_bytes)
    return (head, state_bytes) if len(head) == HEADER.size + body_bytes else None


def read_exactly(read: Read, size: int) -> bytearray:
    """So many bytes; fewer where the stream ends before."""
    parts = bytearray()
    while len(parts) < size and (part := read(min(size - len(parts), 1 << 20))):
        parts += part
    return parts


def _encode(data: dict[str, Any]) -> bytes:
    state: bytes = data.pop("state")
    # ASCII escapes also carry lone surrogates, which a model can write and UTF-8 cannot.
    body = json.dumps(data).encode("ascii")
    return HEADER.pack(len(body), len(state)) + body + state
