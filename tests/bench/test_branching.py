"""The simulation of fork budgets."""

import pytest

from arpo_megatron.algorithms.branching import make_branch_policy
from arpo_megatron.bench.branching import bench_branching, simulate
from arpo_megatron.config import AlgorithmConfig


def test_pooled_forks_branch_again_and_save_calls_of_short_paths() -> None:
    rows = [row for row in bench_branching(trees=40)["rows"] if row["calls"] > 1]
    for row in rows:
        if row["calls"] == 2:
            assert row["pooled"]["calls_over_grpo"] < row["reserved"]["calls_over_grpo"] < 1
        assert row["reserved"]["two_forks"] == 0 < row["pooled"]["two_forks"]


@pytest.mark.parametrize("budget", ["pooled", "reserved"])
def test_simulated_tree_counts_its_calls(budget: str) -> None:
    always = {"branch_probability": 1.0, "entropy_weight": 0.0, "fork_budget": budget}
    policy = make_branch_policy(AlgorithmConfig(**always), vocabulary_size=1000, seed=1)
    tree = simulate(policy, 2, "always", "task", seed=1)
    assert len(tree.forks_of_leaves) == 16
    assert tree.fork_depths == [1] * 8  # all forks at once, after the first call
    assert tree.executed_calls == 8 + 16
