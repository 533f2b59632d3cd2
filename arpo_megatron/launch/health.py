"""The health of a running job: RUN_DIR/health.json, which `arpo health RUN` prints.

The supervisor writes the file at every change and removes it with the last service.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.utils.atomic import atomic_write, write_json
from arpo_megatron.utils.regular_files import read_regular

_WITH_METRICS = ("engine", "sandbox")
"""Beginnings of the names of services that answer /metrics."""
COLUMNS = ("process", "state", "for", "pid", "restarts", "last error", "address", "log")


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


def write_health(path: Path, processes: Sequence[ServiceHealth]) -> None:
    """Write the health of all processes of this process's job. Raises OSError if the disk refuses it."""
    rows = [asdict(process) for process in processes]
    write_json(path, {"host": socket.gethostname(), "pid": os.getpid(), "processes": rows})


def write_scrape_targets(path: Path, processes: Sequence[ServiceHealth], trainer: str = "") -> None:
    """Write engines, tool services and the trainer as targets of Prometheus' file_sd, labelled `run` and `service`.

    Args:
        path: file to write.
        processes: health of the services.
        trainer: URL with the trainer's metrics; "" if there is none.

    Raises:
        OSError: the disk refuses the file.
    """
    found = [(each.name, each.url) for each in processes if each.url and each.name.startswith(_WITH_METRICS)]
    rows = [
        {"targets": [urlsplit(url).netloc], "labels": {"run": path.parent.name, "service": name}}
        for name, url in [*found, *([("trainer", trainer)] if trainer else [])]
    ]
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(rows), encoding="utf-8")


def read_health(run: RunDirectory) -> list[ServiceHealth]:
    """Return the health of a running job's processes.

    Raises:
        UserError: no job with services is running there.
    """
    try:
        health = json.loads(read_regular(run.health))
        if health["host"] == socket.gethostname():  # of a job on another node the file is all there is to see
            Path(f"/proc/{health['pid']}").stat()  # a killed job leaves the file
    except OSError:
        raise UserError(
            f"{run.path} has no services now: the job has ended, or is in its preparation or cold start"
        ) from None
    return [ServiceHealth(**process) for process in health["processes"]]


def print_health(run: RunDirectory) -> None:
    """Print one table on standard output. Raises as `read_health` does."""
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    for process in read_health(run):
        table.add_row(*process.row(time.time()))
    # Wide, so that programs can read one process per line.
    Console(width=None if Console().is_terminal else 1000).print(table)
