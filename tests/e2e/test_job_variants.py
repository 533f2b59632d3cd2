"""The main job in its other shapes, one step each, on top of a finished cold start."""

from pathlib import Path

import pytest
from jobs import SHORT, quickstart, rows_of, run_to_end

from arpo_megatron.monitor.catalogue import undocumented

pytestmark = pytest.mark.timeout(1600)  # the first test of a session waits for the demo

TASKS = 4
SAMPLES = 8  # of the recipe
TWO_RANKS = ["parallel.tensor=2", "parallel.sequence=true"]
GRPO = ["algorithm.name=grpo", "sync.transport=disk", "sync.bucket_mb=1"]


def test_a_step_with_tensor_and_sequence_parallelism(warm_run: Path) -> None:
    run_to_end(quickstart("train", warm_run, "train.steps=1", *SHORT, *TWO_RANKS, "sync.transport=ipc"), warm_run)
    (row,) = rows_of(warm_run / "metrics.jsonl")
    assert row["step"] == 1
    assert row["logprob_gap"] < 1e-3
    assert row["forks"] > 0
    assert not undocumented(row)
    assert (warm_run / "export" / "model.safetensors").exists()


def test_grpo_samples_fresh_trajectories_only(warm_run: Path) -> None:
    run_to_end(quickstart("train", warm_run, "train.steps=1", *SHORT, *GRPO), warm_run)
    (row,) = rows_of(warm_run / "metrics.jsonl")
    assert row["logprob_gap"] < 1e-3
    assert row["forks"] == 0
    assert row["tool_calls_inherited"] == 0
    assert row["trajectories"] == SAMPLES * TASKS
    assert (warm_run / "export" / "model.safetensors").exists()


def test_a_cold_start_with_tensor_and_sequence_parallelism(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_to_end(quickstart("sft", run, "sft.steps=2", "sft.batch=15", *TWO_RANKS), run)
    assert (run / "cold_start" / "model.safetensors").exists()
    updates = [event for event in rows_of(run / "events.jsonl") if event["kind"] == "cold_start"]
    assert updates[-1]["update"] == 2
