"""The protocol between service and supervisor: one request and one outcome over one socket per call.

A request is a header (two lengths), a JSON object, and the state of a session. The answer is the state after the call
in chunks, each after its length, then an empty chunk and the outcome as a JSON object. So neither side holds a whole
state. The service never opens one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

HEADER = struct.Struct("!IQ")
"""Length of the JSON object and length of the state, in bytes."""

CHUNK = struct.Struct("!I")
"""Length of the next part of the state after a call, in bytes; 0: the outcome follows."""

SLOT = struct.Struct("!I")
"""Message to the zygote, sent with the call's socket: the call's slot, see `isolation.enter_supervisor`."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that keep numerical libraries from starting one thread per core in every call."""


@dataclass(frozen=True, slots=True)
class Request:
    """Code and limits of one call. Its first state follows separately."""

    code: str
    time_s: float
    """Wall-clock limit in seconds."""
    output_chars: int
    """Longest answer in characters."""
    output_mib: int
    """Largest output in MiB. A call that writes more is ended."""
    state_mib: int = 0
    """Largest state to return in MiB; 0: return no state."""

    def encode(self, state_bytes: int) -> bytes:
        """Return the message up to its state, which has `state_bytes` and is sent separately."""
        body = _encode(asdict(self))
        return HEADER.pack(len(body), state_bytes) + body

    @classmethod
    def decode(cls, head: bytes | bytearray) -> Request:
        """Return the request of a message's part up to its state, which `read_head` returns."""
        return cls(**json.loads(head[HEADER.size :]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Status and text of one call."""

    status: str
    """"ok", "error" or "timeout", as in `ToolAnswer`; "broken": the sandbox itself failed; `text` has the reason."""
    text: str
    has_state: bool = False
    """Whether the chunks before the outcome are a complete state."""

    def encode(self) -> bytes:
        """Return the end of the answer: an empty chunk, and the fields as JSON."""
        return CHUNK.pack(0) + _encode(asdict(self))

    @classmethod
    def decode(cls, body: bytes) -> Outcome:
        """Return the outcome of a JSON object. Raises ValueError if the supervisor ended before it was complete."""
        return cls(**json.loads(body))


Read = Callable[[int], bytes]
"""Function that reads at most the given number of bytes, and nothing at the end of the stream, like `socket.recv`."""


def read_head(read: Read) -> tuple[bytearray, int] | None:
    """Return the next message up to its state, and the length of the state; None if the stream ends before."""
    head = read_exactly(read, HEADER.size)
    if len(head) < HEADER.size:
        return None
    body_bytes, state_bytes = HEADER.unpack(head)
    head += read_exactly(read, body_bytes)
    return (head, state_bytes) if len(head) == HEADER.size + body_bytes else None


def read_exactly(read: Read, size: int) -> bytearray:
    """Return `size` bytes, or fewer if the stream ends before."""
    parts = bytearray()
    while len(parts) < size and (part := read(min(size - len(parts), 1 << 20))):
        parts += part
    return parts


def _encode(values: dict[str, Any]) -> bytes:
    # ASCII escapes also carry lone surrogates, which a model can write and UTF-8 cannot.
    return json.dumps(values).encode("ascii")
