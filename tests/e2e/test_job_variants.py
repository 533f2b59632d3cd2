"""Variants of the main job, a few steps each, after a finished cold start."""

from collections import Counter
from pathlib import Path

import pytest

from arpo_megatron.monitor.tree_store import read_trees
from arpo_megatron.tree import Role
from tests.e2e.jobs import AHEAD, SHORT, TASKS, TWO_RANKS, quickstart, rows_of, run_to_end, trained, undocumented

pytestmark = pytest.mark.timeout(1600)  # the first test waits for the shared cold start

SAMPLES = 8  # of the recipe
GRPO = ["algorithm.name=grpo", "sync.transport=disk", "sync.bucket_mib=1"]


@pytest.mark.slow_campaign
def test_asynchronous_trees_are_drained_before_each_push(warm_run: Path) -> None:
    """No tree has tokens of two policies, none is too old, and no task is lost.

    `test_engine_death` covers pushes that meet growing trees.
    """
    overrides = [
        *SHORT,
        *TWO_RANKS,
        "sync.transport=ipc",
        "train.steps=2",
        *AHEAD,
        "rollout.across_push=drain",
        "rollout.stale=drop",
    ]
    run_to_end(quickstart("train", warm_run, *overrides), warm_run)
    rows = rows_of(warm_run / "metrics.jsonl")
    assert [row["trees"] for row in rows] == [TASKS] * 2
    assert [row["trajectories"] for row in rows] == [TASKS * SAMPLES] * 2
    assert [row["staleness_max"] for row in rows] == [0, 1]
    assert [row["stale_trees"] for row in rows] == [0, TASKS]
    assert sum(row["forks"] for row in rows) > 0
    first, *later = [row["logprob_gap"] for row in rows]
    assert first < 1e-3
    assert later == [None]  # older weights sampled all of that step
    trees = [item.tree for item in trained(warm_run)]
    assert len({tree.task_id for tree in trees}) == 2 * TASKS
    for tree in trees:
        assert len({segment.policy_version for segment in tree.segments if segment.role is Role.MODEL}) == 1
    for row in rows:
        assert not any(row[name] for name in row if name.startswith("dropped/"))
        assert not undocumented(row)
    assert (warm_run / "export" / "model.safetensors").exists()


@pytest.mark.slow_campaign
def test_grpo_replaces_groups_without_signal_and_counts_dropped_trees(warm_run: Path) -> None:
    """All trajectories begin at the prompt; weights are pushed through the disk."""
    overrides = [
        "train.steps=1",
        *SHORT,
        *GRPO,
        "rollout.oversampling=0.5",
        "algorithm.drop_groups_without_signal=true",
    ]
    run_to_end(quickstart("train", warm_run, *overrides), warm_run)
    for row in rows_of(warm_run / "metrics.jsonl"):
        assert row["logprob_gap"] < 1e-3
        assert row["forks"] == 0
        assert row["tool_calls_inherited"] == 0
        assert row["groups_without_signal"] == 0
        stored = read_trees(warm_run / "trees" / f"step_{row['step']:06d}.parquet")
        reasons = Counter(item.dropped for item in stored)
        assert reasons[None] == TASKS
        for reason in ("no_signal", "oversampled"):
            assert reasons[reason] == row[f"dropped/{reason}"]
        assert reasons.total() > TASKS
        assert row["trees"] == sum(item.complete for item in stored)  # dropped trees stay in the counts
        assert row["trajectories"] == SAMPLES * row["trees"]
    assert (warm_run / "export" / "model.safetensors").exists()


@pytest.mark.slow_campaign
def test_trees_that_continue_on_old_keys_and_values_have_a_gap_of_their_own(warm_run: Path) -> None:
    """The new weights sample with a context that the old ones have encoded: only those tokens differ by more."""
    overrides = ["train.steps=4", *SHORT, *AHEAD, "rollout.across_push=keep_kv", "optimizer.lr=1e-3"]
    run_to_end(quickstart("train", warm_run, *overrides), warm_run)
    rows = rows_of(warm_run / "metrics.jsonl")
    assert all(row["logprob_gap"] is None or row["logprob_gap"] < 1e-3 for row in rows)
    mixed = [row["logprob_gap_old_kv"] for row in rows if row["logprob_gap_old_kv"] is not None]
    assert mixed and 1e-3 < max(mixed) < 5.0, "a tree has continued over a push"
    assert not any(undocumented(row) for row in rows)


@pytest.mark.slow_campaign
def test_sft_with_tensor_and_sequence_parallelism(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_to_end(quickstart("sft", run, "sft.steps=2", "sft.batch=15", *TWO_RANKS), run)
    assert (run / "sft" / "model.safetensors").exists()
    updates = [event for event in rows_of(run / "events.jsonl") if event["kind"] == "sft"]
    assert updates[-1]["update"] == 2
