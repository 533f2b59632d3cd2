"""JSON Lines, one object a line, in files that a killed job or a full disk may have damaged."""

import json
from collections.abc import Iterator
from typing import Any


def json_lines(data: bytes) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield number, from 1, and object of each whole line; None for a line without one. A half-written end is left.

    NaN and infinities, which Python's writer makes of such floats, are None.
    """
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            row = None
        yield number, row if isinstance(row, dict) else None
