"""What service and supervisor say to each other: one JSON request, one JSON outcome, over one socket a call."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass

from tools_sandbox.python_tool.isolation import WorkerLimits

HEADER = struct.Struct("!I")
"""Precedes the request: its length in bytes. The outcome needs none, the end of the stream is its end."""


THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that keep numerical libraries from starting a thread for every core in every call."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call."""

    code: str
    time_s: float
    """Wall-clock limit in seconds."""
    output_chars: int
    limits: WorkerLimits

    def encode(self) -> bytes:
        """Header and body."""
        # ASCII escapes also carry lone surrogates, which a model can write and UTF-8 cannot.
        body = json.dumps(asdict(self)).encode("ascii")
        return HEADER.pack(len(body)) + body

    @classmethod
    def decode(cls, body: bytes) -> Request:
        """From the body alone."""
        data = json.loads(body)
        return cls(data["code"], data["time_s"], data["output_chars"], WorkerLimits(**data["limits"]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call."""

    status: str
    """"ok", "error" or "timeout", as in `ToolAnswer`; "broken": the sandbox itself failed, `text` says why."""
    text: str

    def encode(self) -> bytes:
        """The whole message."""
        return json.dumps(asdict(self)).encode("ascii")

    @classmethod
    def decode(cls, body: bytes) -> Outcome:
        """ValueError: the supervisor ended before it wrote an outcome."""
        if not body:
            raise ValueError("the supervisor of the call ended without an outcome")
        return cls(**json.loads(body))
