"""The metrics of a run's last step at /metrics, for Prometheus."""

import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_TAIL_BYTES = 2**16
"""More than a row of metrics.jsonl."""
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@contextmanager
def trainer_metrics(metrics: Path, host: str, port: int) -> Iterator[str]:
    """Answer /metrics inside the block, and yield the address of the server as http://HOST:PORT.

    Args:
        metrics: metrics.jsonl of the run.
        host: address to listen on.
        port: TCP port.

    Raises:
        OSError: the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            found = self.path == "/metrics"
            body = render(metrics).encode() if found else b""
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", _TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Log nothing: standard error is the job's display."""

    with ThreadingHTTPServer((host, port), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="trainer metrics", daemon=True).start()
        try:
            yield f"http://{host}:{server.server_address[1]}"
        finally:
            server.shutdown()


def render(metrics: Path) -> str:
    """Return the last whole row as gauges: `seconds/update` is arpo_seconds_update. Empty before the first step."""
    lines = []
    for name, value in _last_row(metrics).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            gauge = f"arpo_{re.sub(r'[^A-Za-z0-9_]', '_', name)}"
            lines += [f"# TYPE {gauge} gauge", f"{gauge} {value}"]
    return "".join(f"{line}\n" for line in lines)


def _last_row(metrics: Path) -> dict[str, object]:
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            whole = file.read().rpartition(b"\n")[0]
        row = json.loads(whole.rpartition(b"\n")[2])
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}
