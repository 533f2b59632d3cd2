"""`arpo bench sandbox` compares isolated python calls with cold interpreters, next to its goals."""

import json

import pytest
from typer.testing import CliRunner

from arpo_megatron.cli.main import app


@pytest.mark.slow_campaign
def test_bench_reports_figures_and_goals() -> None:
    """The figures are not compared with the goals, which a quiet machine reaches: tests run on busy ones."""
    command = ["bench", "sandbox", "--cold-calls", "2", "--in-flight", "4", "--passages", "1000"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["goals"] == {"latency_ratio": 30, "throughput_ratio": 20}
    for name, goal in figures["goals"].items():
        assert figures[name] == figures["python"][name] > 0
        assert f"{name} {figures[name]} (goal on a quiet machine: {goal:g})" in result.stderr
    assert figures["python"]["isolation"] in ("contained", "full")
