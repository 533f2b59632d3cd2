"""JSON messages on a stream between the service and its workers: four bytes of length, then the message."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

_LENGTH = struct.Struct("!I")


def encode(message: dict[str, Any]) -> bytes:
    """Length and body. ASCII escapes also carry lone surrogates, which a model can write and UTF-8 cannot."""
    body = json.dumps(message).encode("ascii")
    return _LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; none when the other side is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        message: dict[str, Any] = json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        return None
    return message
