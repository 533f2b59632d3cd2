"""JSON messages on a stream between two processes: four bytes of length, then the message."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

_LENGTH = struct.Struct("!I")


def encode(message: dict[str, Any]) -> bytes:
    """Return length and body. ASCII escapes also carry lone surrogates, which UTF-8 cannot represent."""
    body = json.dumps(message).encode("ascii")
    return _LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message, or None when the other side has gone or has sent something else."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        message = json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError, ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
