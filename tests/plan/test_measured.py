"""Measured seconds of a run next to those of its plan."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from arpo_megatron.cli.main import app
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.plan.measured import measured_seconds

ROWS = (
    {"step": 1, "seconds/rollout": 500.0, "seconds/update": 90.0},
    {"step": 2, "seconds/rollout": 60.0, "seconds/update": 30.0, "seconds/ratios": 0.5},
    {"step": 3, "seconds/rollout": 80.0, "seconds/update": 34.0, "seconds/save": 4.0},
)


def run_with(directory: Path, rows: tuple[dict[str, float], ...], name: str = "metrics.jsonl") -> RunDirectory:
    """Write a run directory of deepsearch_14b on four nodes with these metrics."""
    save_config(resolve.resolve("deepsearch_14b+4nodes"), directory / "config.yaml")
    (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunDirectory(directory)


def test_seconds_are_means_over_the_steps_after_the_first(tmp_path: Path) -> None:
    expected = {"rollout": 70.0, "update": 32.0, "ratios": 0.25, "save": 2.0}
    assert measured_seconds(run_with(tmp_path, ROWS), sft=False) == expected
    assert measured_seconds(run_with(tmp_path, ROWS, "sft_metrics.jsonl"), sft=True) == expected


def test_run_without_a_second_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl has no step after the first one"):
        measured_seconds(run_with(tmp_path, ROWS[:1]), sft=False)


def test_plan_command_prints_a_run_next_to_the_plan_of_its_config(tmp_path: Path) -> None:
    run_with(tmp_path, ROWS)
    command = ["plan", "deepsearch_14b", "--no-search", "--measured", str(tmp_path)]
    text = CliRunner().invoke(app, command).output
    assert "tensor 4 x data 8" in text, "the layout is the run's"
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("  ")}
    assert rows["rollout"][1] == "70.0" and rows["update"][1] == "32.0" and rows["save"][1] == "2.0"
    assert rows["push"][1] == "-" and rows["ratios"] == ["-", "0.2"]
    assert "104.2" in next(line for line in text.splitlines() if line.startswith("a step, seconds"))
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert found["measured_seconds_by_phase"].keys() == {"rollout", "update", "ratios", "save"}


def test_measured_run_and_config_file_exclude_each_other(tmp_path: Path) -> None:
    run_with(tmp_path, ROWS)
    done = CliRunner().invoke(app, ["plan", "deepsearch_14b", "--measured", str(tmp_path), "--config", "x.yaml"])
    assert isinstance(done.exception, UserError) and "leave out --config" in str(done.exception)
