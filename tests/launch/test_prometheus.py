"""A real Prometheus reads a run's list of services, and answers the queries of the dashboard."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from arpo_megatron.launch.health import ServiceHealth, write_scrape_targets
from arpo_megatron.launch.trainer_metrics import trainer_metrics
from arpo_megatron.utils.ports import free_ports
from tests.packages import install
from tests.tools_sandbox.helpers.services import running, wait_until
from tools_sandbox.config import TOKEN_VARIABLE

MONITORING = Path(__file__).resolve().parents[2] / "slurm" / "monitoring"
TOKEN = "token-of-the-tools"


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def rows(self, query: str) -> dict[str, float]:
        """Return the values of a query by service. Raises HTTPError if the query is invalid."""
        answer = requests.get(f"{self._url}/api/v1/query", {"query": query}, timeout=10)
        answer.raise_for_status()
        return {row["metric"].get("service", ""): float(row["value"][1]) for row in answer.json()["data"]["result"]}

    def is_ready(self) -> bool:
        try:
            return requests.get(f"{self._url}/-/ready", timeout=10).ok
        except requests.ConnectionError:
            return False


@contextmanager
def prometheus(run: Path, folder: Path) -> Iterator[Prometheus]:
    """Start Prometheus with the configuration of `slurm/monitoring` for one run, and shorter intervals."""
    text = (MONITORING / "prometheus.yml").read_text().replace("RUN/", f"{run}/").replace("10s", "1s")
    (folder / "prometheus.yml").write_text(text)
    (folder / "tools_token").write_text(TOKEN)
    (port,) = free_ports(1)
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(["prometheus", *options, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)
    try:
        found = Prometheus(f"http://127.0.0.1:{port}")
        wait_until(found.is_ready)
        yield found
    finally:
        server.terminate()
        server.wait()


def queries() -> list[str]:
    panels: list[dict[str, Any]] = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.mark.slow_campaign
def test_prometheus_reads_tools_and_trainer_and_answers_the_dashboard(tmp_path: Path) -> None:
    if why := install("prometheus", "prometheus"):
        pytest.skip(f"no Prometheus: {why}")
    (run := tmp_path / "run").mkdir()
    (metrics := run / "metrics.jsonl").write_text(
        json.dumps({"step": 3, "success": 0.75, "seconds/update": 2.5}) + "\n"
    )
    with running(None, env={TOKEN_VARIABLE: TOKEN}) as tools, trainer_metrics(metrics, "127.0.0.1", 0) as trainer:
        sandbox = ServiceHealth("sandbox", 1, up=True, since=0.0, restarts=0, last_error="", url=tools.url, log="")
        write_scrape_targets(run / "prometheus.json", [sandbox], trainer)
        with prometheus(run, tmp_path) as server:
            wait_until(lambda: server.rows("up") == {"sandbox": 1.0, "trainer": 1.0})
            assert server.rows("arpo_success") == {"trainer": 0.75}
            for query in queries():
                server.rows(query.replace("$run", run.name))
