"""The log on standard error: one JSON object or one line of text per record."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

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


def set_up(style: Literal["json", "text"]) -> None:
    """Send the log of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else logging.Formatter("tools_sandbox: %(message)s"))
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger("tools_sandbox").setLevel(logging.INFO)
