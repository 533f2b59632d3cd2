"""A run lists its services for Prometheus, and the dashboard asks for metrics that they have."""

import json
import re
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from arpo_megatron.launch.health import ServiceHealth, write_scrape_targets
from arpo_megatron.launch.trainer_metrics import render, trainer_metrics
from tools_sandbox.service.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]


def test_services_with_metrics_are_listed(tmp_path: Path) -> None:
    def service(name: str, url: str) -> ServiceHealth:
        return ServiceHealth(name, 1, up=True, since=0.0, restarts=0, last_error="", url=url, log="")

    file = tmp_path / "prometheus.json"
    names = ("engine-0", "sandbox", "router", "rollout")
    services = [service(name, f"http://10.0.0.{number}:99") for number, name in enumerate(names)]
    write_scrape_targets(file, services, "http://10.0.0.9:98")
    assert json.loads(file.read_text()) == [
        {"targets": ["10.0.0.0:99"], "labels": {"run": tmp_path.name, "service": "engine-0"}},
        {"targets": ["10.0.0.1:99"], "labels": {"run": tmp_path.name, "service": "sandbox"}},
        {"targets": ["10.0.0.9:98"], "labels": {"run": tmp_path.name, "service": "trainer"}},
    ]


def test_each_listed_service_belongs_to_one_job_of_the_configuration() -> None:
    text = (ROOT / "slurm" / "monitoring" / "prometheus.yml").read_text()
    jobs = {job["job_name"]: job for job in yaml.safe_load(text)["scrape_configs"]}
    assert all(job["file_sd_configs"][0]["files"] == ["RUN/prometheus.json"] for job in jobs.values())
    kept = {name: job["relabel_configs"] for name, job in jobs.items()}
    assert all(rule["source_labels"] == ["service"] and rule["action"] == "keep" for (rule,) in kept.values())
    for service, expected in {
        "engine": "engines",
        "engine-3": "engines",
        "sandbox-1": "tools",
        "trainer": "trainer",
    }.items():
        assert [name for name, (rule,) in kept.items() if re.fullmatch(rule["regex"], service)] == [expected]


def test_trainer_answers_with_the_numbers_of_the_last_whole_row(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert render(metrics) == ""
    first, last = {"step": 1}, {"step": 2, "seconds/update": 1.5, "number_format": "float32", "logprob_gap": None}
    metrics.write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n" + '{"step": 3, "rew')
    lines = "# TYPE arpo_step gauge\narpo_step 2\n# TYPE arpo_seconds_update gauge\narpo_seconds_update 1.5\n"
    with trainer_metrics(metrics, "127.0.0.1", 0) as url:
        assert urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode() == lines
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/else", timeout=10)


def shown(panel: dict[str, Any]) -> str:
    """Return a panel's query. Versions of prometheus-client write an engine's metrics with a colon or an underscore."""
    return str(panel["targets"]).replace("sglang[:_]", "sglang:")


def test_dashboard_shows_metrics_that_the_services_have() -> None:
    panels = json.loads((ROOT / "slurm" / "monitoring" / "grafana.json").read_text())["panels"]
    asked = {name for panel in panels for name in re.findall(r"(?:sglang:|tools_sandbox_)\w+", shown(panel))}
    of_the_tools = Metrics()
    of_the_tools.answers.labels("python", "ok")
    of_the_tools.refusals.labels("busy")
    of_the_tools.execution.labels("python")
    of_the_tools.waiting.labels("python")
    there = of_the_tools.render().decode()
    spec = find_spec("sglang")  # found, not imported: that takes seconds
    assert spec is not None and spec.origin is not None
    sources = (Path(spec.origin).parent / "srt" / "observability").glob("*.py")
    engine = "".join(path.read_text() for path in sources)
    assert len(asked) == 9
    assert [name for name in asked if name not in there and f'"{name}"' not in engine] == []
    documented = (ROOT / "docs" / "reference" / "run-directory.md").read_text()
    of_the_trainer = {name for panel in panels for name in re.findall(r"arpo_(\w+)\{", shown(panel))}
    assert of_the_trainer == {"success", "slowest_rank"}
    assert all(f"| `{name}` |" in documented for name in of_the_trainer)
