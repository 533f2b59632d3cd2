"""What is up in a running job: a page of the job's process, and `arpo health RUN_DIR`, which prints it.

RUN_DIR/health.json holds the page's address while the job has services: `url` (HTML), `url`/health.json (the same as
JSON). It listens on 127.0.0.1 only and only tells.
"""

import html
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests
from aiohttp import web
from rich.console import Console
from rich.table import Table

from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.utils.atomic import write_json

COLUMNS = ("role", "state", "for", "pid", "restarts", "last error", "address", "log")
_ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """One role of the job.

    Attributes:
        name: engine, sandbox, router, train, ...
        pid: of its main process; None before it has one.
        up: it answers its probe (a service), or runs (any other role).
        since: seconds since the epoch; when it came up, went down or was started first.
        restarts: how often it was started anew.
        last_error: why it was last restarted; "" for never: a service that is not up then is in its first start.
        url: where it serves; "" for a role that does not.
        log: file of its output.
    """

    name: str
    pid: int | None
    up: bool
    since: float
    restarts: int
    last_error: str
    url: str
    log: str

    def row(self, now: float) -> tuple[str, ...]:
        """The content of `COLUMNS` at `now`, seconds since the epoch."""
        minutes, seconds = divmod(int(now - self.since), 60)
        pid = "-" if self.pid is None else str(self.pid)
        state = "up" if self.up else "down" if self.last_error else "starting"
        return (
            self.name,
            state,
            f"{minutes}:{seconds:02d}",
            pid,
            str(self.restarts),
            self.last_error,
            self.url,
            self.log,
        )


class HealthPage:
    """A tiny web server in the running event loop; `read` says what is up."""

    def __init__(self, read: Callable[[], Sequence[ServiceHealth]]) -> None:
        self._read = read
        self._runner: web.AppRunner | None = None

    async def open(self, address: Path) -> None:
        """Serve on any free port, and write it to the JSON file `address`."""
        app = web.Application()
        app.router.add_get("/", self._html)
        app.router.add_get("/health.json", self._json)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        write_json(address, {"url": f"http://127.0.0.1:{self._runner.addresses[0][1]}", "pid": os.getpid()})

    async def close(self, address: Path) -> None:
        """Stop serving."""
        address.unlink(missing_ok=True)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _json(self, _request: web.Request) -> web.Response:
        return web.json_response({"time": time.time(), "roles": [asdict(role) for role in self._read()]})

    async def _html(self, _request: web.Request) -> web.Response:
        now = time.time()
        rows = [COLUMNS, *(role.row(now) for role in self._read())]
        lines = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        head = '<!doctype html><meta http-equiv="refresh" content="2"><title>arpo</title>'
        style = "<style>td{padding:0 1em 0 0;font:14px monospace;vertical-align:top}</style>"
        return web.Response(text=f"{head}{style}<table>{''.join(lines)}</table>", content_type="text/html")


def read_health(run: RunDirectory) -> dict[str, Any]:
    """What the page of a running job says now.

    Raises:
        UserError: no job with services is running there.
    """
    try:
        url = json.loads(run.health.read_text(encoding="utf-8"))["url"]
        with requests.Session() as session:
            session.trust_env = False  # a cluster's HTTP_PROXY knows nothing of 127.0.0.1
            answer: dict[str, Any] = session.get(f"{url}/health.json", timeout=_ASK_TIMEOUT_S).json()
    except (OSError, ValueError, requests.RequestException):
        raise UserError(
            f"no engine or tool service of {run.path} is watched on this machine now: the job has ended, or is in its "
            "preparation or cold start"
        ) from None
    return answer


def print_health(run: RunDirectory) -> None:
    """One table on standard output. Raises as `read_health` does."""
    found = read_health(run)
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    for role in found["roles"]:
        table.add_row(*ServiceHealth(**role).row(found["time"]))
    Console(width=None if Console().is_terminal else 1000).print(table)  # a line a role for programs that read it
