"""The log on standard error: one JSON object or one line of text per record."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from typing import Any, Literal

_STANDARD = frozenset(vars(logging.makeLogRecord({})))


class JsonFormatter(logging.Formatter):
    """A formatter of JSON lines: time (UTC, ISO 8601), level, event, the fields of `extra`, and the exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of ASCII."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{moment}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        line["event"] = record.getMessage()
        line.update({name: value for name, value in vars(record).items() if name not in _STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """A formatter of lines of text, of which no part of a message can look like another record."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        """Return the message as one line."""
        return "tools_sandbox: " + _one_line(record.message)

    def formatException(self, ei: Any) -> str:  # noqa: N802  (logging's name)
        """Return the traceback with a mark at each line."""
        return "\n".join(f"  | {_one_line(line)}" for line in super().formatException(ei).split("\n"))


def _one_line(text: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class RarerAndRarer(logging.Filter):
    """Passes the first, second, fourth, eighth record of each warning.

    Strangers can cause uvicorn's warnings (a request that is no HTTP) without a token, so these must not fill the log.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record; one that was repeated gets its number."""
        if record.levelno != logging.WARNING:
            return True
        kind = str(record.msg)
        self._counts[kind] += 1
        count = self._counts[kind]
        if count > 1:
            record.msg = f"{kind} (warning {count} of this kind)"
        return is_logged(count)


def is_logged(count: int) -> bool:
    """Return whether to log a repeated event, given its number: the first, second, fourth, eighth."""
    return count & (count - 1) == 0


def limit_uvicorn() -> None:
    """Bound the warnings that strangers can cause in a server of this process."""
    logger = logging.getLogger("uvicorn.error")
    if not any(isinstance(each, RarerAndRarer) for each in logger.filters):
        logger.addFilter(RarerAndRarer())


def set_up(style: Literal["json", "text"]) -> None:
    """Send the log of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], force=True)
    limit_uvicorn()
    logging.getLogger("tools_sandbox").setLevel(logging.INFO)
