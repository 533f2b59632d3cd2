"""A job uses tool services that the user has started (`sandbox.urls`), also if one of them is killed."""

import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
import requests

from arpo_megatron.monitor.tree_store import read_trees
from arpo_megatron.rollout.tools import service_of
from tests.e2e.jobs import ARPO, SHORT, Start, check_steps, quickstart, rows_of, wait_for
from tests.tools_sandbox.helpers.services import Service, running
from tools_sandbox.config import TOKEN_VARIABLE

pytestmark = [pytest.mark.timeout(1600), pytest.mark.slow_campaign]

TOKEN, STEPS, KILLED = "of both services", 3, 0


def answered(service: Service) -> int:
    """Return how many calls a service has answered."""
    page = requests.get(f"{service.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30).text
    counts = [line.split() for line in page.splitlines() if line.startswith("tools_sandbox_answers_total{")]
    return int(sum(float(value) for *_, value in counts))


def refused(command: list[str], token: str) -> str:
    """Run a command that must end with exit code 1 or 2, and return its output without line breaks."""
    environment = {**os.environ, TOKEN_VARIABLE: token}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    return " ".join((done.stdout + done.stderr).split())


def test_job_loses_nothing_when_one_of_two_given_tool_services_is_killed(
    sft_run: Path, warm_run: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The services search the corpus of an earlier run with the same tasks, as docs/guides/tools.md describes."""
    shutil.copytree(sft_run, earlier := tmp_path / "earlier")
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with running(earlier / "sandbox.yaml") as one, running(earlier / "sandbox.yaml") as other:
        urls = f"sandbox.urls=[{one.url},{other.url}]"
        wrong_token = (
            f"sandbox.urls: tool service at {one.url} does not list its tools: HTTP 401: compare {TOKEN_VARIABLE}"
        )
        assert wrong_token in refused([*ARPO, "doctor", "quickstart", urls], "another")
        unreachable = refused(
            [*quickstart("train", tmp_path / "no", f"sandbox.urls=[{one.url},http://127.0.0.1:9]")], TOKEN
        )
        assert "sandbox.urls: tool service at http://127.0.0.1:9 " in unreachable and ": start it" in unreachable

        job = start(quickstart("train", warm_run, f"train.steps={STEPS}", *SHORT, urls))
        wait_for("first step", lambda: rows_of(warm_run / "metrics.jsonl"), job)
        commands = [" ".join(each.cmdline()) for each in psutil.Process(job.pid).children(recursive=True)]
        assert any("rollout.worker" in each for each in commands)
        assert not any("tools_sandbox" in each for each in commands), "the job has started a tool service of its own"
        assert min(before := [answered(one), answered(other)]) > 0
        one.process.kill()
        assert job.wait(600) == 0, job.communicate()[1][-3000:]
        assert answered(other) > before[1]
    check_steps(warm_run, STEPS)
    rows = rows_of(warm_run / "metrics.jsonl")
    assert not any(row["tool_calls_failed"] or row["trajectories_lost"] for row in rows)
    assert sum(row["requests_repeated"] for row in rows) > 0
    later = [
        item.tree
        for step in range(2, STEPS + 1)
        for item in read_trees(warm_run / "trees" / f"step_{step:06d}.parquet")
    ]
    moved = [tree for tree in later if service_of(tree.task_id, 2) == KILLED]
    statuses = [segment.tool.status for tree in moved for segment in tree.segments if segment.tool is not None]
    assert "ok" in statuses
