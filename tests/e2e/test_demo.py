"""The main job keeps its promises on real parts."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from arpo_megatron.cli.trees import replay_trees
from tests.e2e.jobs import ARPO

pytestmark = pytest.mark.timeout(1600)  # the fixture trains an agent


def test_the_agent_begins_mediocre_and_learns(demo: dict[str, Any]) -> None:
    assert demo["success_before"] <= 0.60
    assert demo["success_after"] >= 0.85
    assert demo["forks"] > 0
    assert demo["tool_calls_executed"] > 0
    assert demo["tool_calls_inherited"] > 0


def test_trainer_and_engine_agree_after_every_push(demo: dict[str, Any]) -> None:
    assert demo["logprob_gap_max"] < 1e-3
    rows = [json.loads(line) for line in (Path(demo["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == demo["steps"]
    assert all(row["logprob_gap"] < 1e-3 for row in rows)


def test_the_radix_cache_serves_what_the_trees_predict(demo: dict[str, Any]) -> None:
    assert abs(demo["cached_prompt_share"] - demo["predicted_cached_share"]) < 0.1


def test_the_screen_shows_an_answered_question_and_a_tree(demo: dict[str, Any]) -> None:
    for words in (
        "held-out question",
        "<search>",
        "<result>",
        "\\boxed{",
        "transformers and SGLang agree",
        "forks after",
    ):
        assert words in demo["screen"], words


def test_the_export_answers_held_out_tasks(demo: dict[str, Any]) -> None:
    command = [*ARPO, "eval", demo["run_dir"], "--tasks", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["tasks"] == 40
    assert figures["not_answered"] == 0
    assert figures["success"] >= 0.7


def test_a_checkpoint_exports_to_the_weights_that_training_ended_with(demo: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    out = tmp_path / "export"
    done = subprocess.run(
        [*ARPO, "export", demo["run_dir"], "--out", str(out)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = (load_file(path / "model.safetensors") for path in (out, Path(demo["export_dir"])))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


def test_trees_of_a_run_can_be_drawn(demo: dict[str, Any]) -> None:
    command = [*ARPO, "trees", demo["run_dir"], "--step", "1", "--count", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "unique/flat" in done.stdout
    assert done.stdout.count(" trajectories, ") == 2


def test_the_decisions_of_every_stored_tree_follow_from_it(
    demo: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted((Path(demo["run_dir"]) / "trees").iterdir())
    assert len(files) == demo["steps"]
    for file in files:  # what `arpo replay-tree` does, without a start of it for each
        assert replay_trees(file, tree=None, config=None), capsys.readouterr().out
        assert "all follow" in capsys.readouterr().out
