"""A whole job as others see it: W&B, TensorBoard, the trainer's numbers for Prometheus, and news."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import ARPO, SHORT, TASKS, Start, quickstart, rows_of, wait_for
from tests.monitor.test_metrics import events_of, records_of
from tests.tools_sandbox.helpers.services import wait_until
from tests.webhook import receiver

pytestmark = [pytest.mark.timeout(1600), pytest.mark.slow_campaign]

VARIABLE = "ARPO_TEST_WEBHOOK"


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    with receiver() as (address, received):
        monkeypatch.setenv(VARIABLE, address)
        yield received


def closed(run: Path) -> int:
    """Return how many W&B runs are complete: wandb's service writes the end of a file after the run has been closed."""
    return sum(record.HasField("exit") for record in records_of(run))


def test_job_is_seen_by_wandb_tensorboard_prometheus_and_a_webhook(
    warm_run: Path, start: Start, posted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    outputs = ["monitor.wandb=offline", "monitor.tensorboard=true", f"monitor.webhook_variable={VARIABLE}"]
    job = start(quickstart("train", warm_run, "train.steps=2", "train.save_every=1", *SHORT, *outputs))
    wait_for("first step", lambda: rows_of(warm_run / "metrics.jsonl"), job)
    targets = {
        row["labels"]["service"]: row["targets"] for row in json.loads((warm_run / "prometheus.json").read_text())
    }
    assert targets.keys() == {"engine", "sandbox", "trainer"}
    page = urllib.request.urlopen(f"http://{targets['trainer'][0]}/metrics", timeout=30).read().decode()
    assert "\narpo_success " in page and "\narpo_seconds_update " in page
    _, screen = job.communicate(timeout=600)
    assert job.returncode == 0, screen[-3000:]
    assert not (warm_run / "prometheus.json").exists(), "nothing is left to ask"

    (folder,) = (warm_run / "wandb").glob("offline-run-*")
    assert f"wandb: wandb sync {folder}" in screen
    wait_until(lambda: closed(warm_run) == 1)
    artifacts = {each.artifact.type: each.artifact for each in records_of(warm_run) if each.HasField("artifact")}
    references = [Path(entry.ref).name for entry in artifacts["model"].manifest.contents]
    assert "config" in artifacts and "model.safetensors" in references
    tables = [json.loads(path.read_text())["data"] for path in folder.glob("files/media/table/samples_*.json")]
    assert tables and all(len(table) == TASKS for table in tables)
    scalars = {
        (event.step, value.tag)
        for file in (warm_run / "tensorboard").iterdir()
        for event in events_of(file)
        for value in event.summary.value
    }
    assert {(1, "success"), (2, "success"), (2, "seconds/update")} <= scalars
    assert [(each["event"], each["step"], each["run_dir"]) for each in posted] == [("finished", 2, str(warm_run))]

    evaluated = [*ARPO, "eval", str(warm_run), "--tasks", "2"]
    done = subprocess.run(evaluated, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (again,) = set((warm_run / "wandb").glob("offline-run-*")) - {folder}
    assert f"wandb: wandb sync {again}" in done.stderr
    wait_until(lambda: closed(warm_run) == 2)
    summary = {item.key or "/".join(item.nested_key) for r in records_of(warm_run) for item in r.summary.update}
    assert any(name.startswith("eval/") and name.endswith("/accuracy") for name in summary)
