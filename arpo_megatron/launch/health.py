"""The health page of a running job, and `arpo health RUN_DIR`, which prints it.

RUN_DIR/health.json holds the page's address while the job has services: `url` (HTML), `url`/health.json (the same as
JSON). The page listens on 127.0.0.1 only.
"""

import html
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests
from rich.console import Console
from rich.table import Table

from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.utils.atomic import write_json

COLUMNS = ("process", "state", "for", "pid", "restarts", "last error", "address", "log")
_READ_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """The health of one process of the job."""

    name: str
    """engine, sandbox, router, train, ..."""
    pid: int | None
    """First process of its group; None before it is started."""
    up: bool
    """It answers its probe (a service), or runs (any other process)."""
    since: float
    """When it came up, went down or was first started, in seconds since the epoch."""
    restarts: int
    last_error: str
    """Why it was last restarted; "" if it never was."""
    url: str
    """Its address; "" for a process that serves nothing."""
    log: str

    def row(self, now: float) -> tuple[str, ...]:
        """Return the content of `COLUMNS` at `now`, in seconds since the epoch."""
        minutes, seconds = divmod(int(now - self.since), 60)
        return (
            self.name,
            "up" if self.up else "down" if self.last_error else "starting",
            f"{minutes}:{seconds:02d}",
            "-" if self.pid is None else str(self.pid),
            str(self.restarts),
            self.last_error,
            self.url,
            self.log,
        )


class HealthPage:
    """Serve the health of all processes as HTML and as JSON, on 127.0.0.1, from a thread.

    Args:
        address: JSON file that gets the page's URL.
        read: returns the health of all processes.
    """

    def __init__(self, address: Path, read: Callable[[], Sequence[ServiceHealth]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                as_json = self.path == "/health.json"
                body = (_json_page(read()) if as_json else _html_page(read())).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json" if as_json else "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._address = address
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="health page", daemon=True).start()
        write_json(address, {"url": f"http://127.0.0.1:{self._server.server_port}", "pid": os.getpid()})

    def close(self) -> None:
        """Remove the address file and stop the web server."""
        self._address.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()


def _json_page(processes: Sequence[ServiceHealth]) -> str:
    return json.dumps({"time": time.time(), "processes": [asdict(process) for process in processes]})


def _html_page(processes: Sequence[ServiceHealth]) -> str:
    now = time.time()
    rows = [COLUMNS, *(process.row(now) for process in processes)]
    lines = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    head = '<!doctype html><meta http-equiv="refresh" content="2"><title>arpo</title>'
    style = "<style>td{padding:0 1em 0 0;font:14px monospace;vertical-align:top}</style>"
    return f"{head}{style}<table>{''.join(lines)}</table>"


def read_health(run: RunDirectory) -> dict[str, Any]:
    """Return the content of a running job's page.

    Raises:
        UserError: no job with services is running there.
    """
    try:
        url = json.loads(run.health.read_text(encoding="utf-8"))["url"]
        with requests.Session() as session:
            session.trust_env = False  # a cluster's HTTP_PROXY does not reach 127.0.0.1
            answer: dict[str, Any] = session.get(f"{url}/health.json", timeout=_READ_TIMEOUT_S).json()
    except (OSError, ValueError, requests.RequestException):
        raise UserError(
            f"{run.path} has no services on this machine now: the job has ended, or is in its preparation or cold start"
        ) from None
    return answer


def print_health(run: RunDirectory) -> None:
    """Print one table on standard output. Raises as `read_health` does."""
    health = read_health(run)
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    for process in health["processes"]:
        table.add_row(*ServiceHealth(**process).row(health["time"]))
    # Wide, so that programs can read one process per line.
    Console(width=None if Console().is_terminal else 1000).print(table)
