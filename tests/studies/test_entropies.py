"""Entropy of stored trees: which tokens count where, and the page over several seeds."""

from pathlib import Path

import numpy as np
import pytest

from arpo_megatron.config.io import save_config
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.tree_store import TreeLog
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.studies import entropies
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Role, RolloutTree, ToolRecord


def tool_record() -> ToolRecord:
    return ToolRecord("search", {"query": "x"}, "ok", seconds=0.0, cached=False)


def test_tokens_count_by_the_start_of_their_turn_and_later_ones_elsewhere() -> None:
    tree = RolloutTree("task", [1])
    first = tree.add(0, Role.MODEL, [2, 3], logprobs=[-1.0] * 2, entropies=[0.5, 0.25])
    on = tree.add(first, Role.MODEL, [4, 4], logprobs=[-1.0] * 2, entropies=[9.0, 8.0])  # the same turn, after a push
    tool = tree.add(on, Role.TOOL, [5], tool=tool_record())
    tree.add(tool, Role.MODEL, [6] * 5, logprobs=[-1.0] * 5, entropies=[2.0, 1.0, 0.5, 0.25, 0.125])
    tree.add(tool, Role.MODEL, [7], logprobs=[-1.0], entropies=[1.0])
    assert entropies.tree_entropies(tree, 3) == [
        ("prompt", 0, 0.5),
        ("prompt", 1, 0.25),
        ("prompt", 2, 9.0),
        ("elsewhere", -1, 8.0),
        ("search", 0, 2.0),
        ("search", 1, 1.0),
        ("search", 2, 0.5),
        ("elsewhere", -1, 0.25),
        ("elsewhere", -1, 0.125),
        ("search", 0, 1.0),
    ]


def entropy_run(path: Path, seed: int, first: float) -> RunDirectory:
    """Write a run whose first token after the tool result has `first` nats."""
    run = RunDirectory(path)
    config = resolve.resolve("trails+grpo", overrides=["algorithm.entropy_tokens=2", f"seed={seed}"])
    run.path.mkdir(parents=True)
    save_config(config, run.config)
    tree = RolloutTree("task", [1])
    asks = tree.add(0, Role.MODEL, [2] * 40, logprobs=[-1.0] * 40, entropies=[0.25] * 2 + [0.125] * 38)
    tool = tree.add(asks, Role.TOOL, [5], tool=tool_record())
    tree.add(tool, Role.MODEL, [6] * 40, logprobs=[-1.0] * 40, entropies=[first, 1.0] + [0.125] * 38)
    task = Task("task", (), "1", "math", "x")
    TreeLog(run, print).store(1, [ScoredTree(task, tree, np.ones(1), np.ones(1), np.ones(1, bool))], str)
    return run


def test_page_compares_first_tokens_after_tools_of_an_arm_without_forks(tmp_path: Path) -> None:
    runs = [entropy_run(tmp_path / f"grpo-{seed}", seed, 2.0) for seed in (1, 2)]
    page = entropies.write_report(entropies.collect(runs), tmp_path / "report", "made by hand")[0].read_text()
    assert "The first tokens after a tool result have 1.500 nats on average." in page
    assert "First tokens after the prompt have 0.250; the difference is +1.250" in page
    assert "Tokens elsewhere have 0.125; the difference is +1.375" in page
    assert "| after | 1 | 2 | all of these |" in page
    assert "| search | 2.000 | 1.000 | 1.500 |" in page
    assert "| elsewhere |  |  | 0.125 |" in page
    assert "| search | 2.5% | 23.1% | 66.7% | 33.3% |" in page  # 2 of 80 tokens, 3 of 13 nats, 2 and 1 of these 3
    assert "| elsewhere | 95.0% | 73.1% |  |  |" in page


def test_runs_of_a_seed_are_one_observation(tmp_path: Path) -> None:
    per_seed = {1: [1.0, 2.0, 3.0], 2: [3.0], 3: [6.0]}  # nats of the first of two tokens; the second has 1
    runs = [
        entropy_run(tmp_path / f"arm{number}-seed{seed}", seed, first)
        for seed, firsts in per_seed.items()
        for number, first in enumerate(firsts)
    ]
    rows = entropies.collect(runs)
    page = entropies.render(rows, "made by hand")
    means = [(float(np.mean(firsts)) + 1) / 2 for firsts in per_seed.values()]  # 1.5, 2, 3.5: less 0.25 for the prompt
    half = 4.302653 * float(np.std(means, ddof=1)) / 3**0.5  # Student's quantile with 2 degrees of freedom
    middle = float(np.mean(means))
    assert f"after a tool result have {middle:.3f} nats" in page
    ends = f"({middle - 0.25 - half:+.3f} to {middle - 0.25 + half:+.3f})"
    assert f"the difference is {middle - 0.25:+.3f} {ends} over 3 seeds (5 runs)." in page
    assert "mean and 95 % interval over 3 seeds (5 runs)](entropy.svg)" in page
    band = entropies.bands(rows[rows.after == "search"], "step")["search"]
    np.testing.assert_allclose([band.mean[0], band.low[0], band.high[0]], [middle, middle - half, middle + half], 1e-6)


def test_single_seed_has_no_interval(tmp_path: Path) -> None:
    runs = [entropy_run(tmp_path / f"arm{number}", 1, first) for number, first in enumerate((1.0, 3.0))]
    rows = entropies.collect(runs)
    page = entropies.render(rows, "made by hand")
    assert "First tokens after the prompt have 0.250, a difference of +1.250 (one seed, no interval)." in page
    assert "by step, mean of 1 seed (2 runs)](entropy.svg)" in page
    band = entropies.bands(rows, "step")["search"]
    assert band.low.tolist() == band.mean.tolist() == band.high.tolist()


def test_run_given_twice_is_an_error(tmp_path: Path) -> None:
    run = entropy_run(tmp_path / "run", 1, 2.0)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(UserError, match=r"given twice: .*/run and .*/link"):
        entropies.collect([run, RunDirectory(tmp_path / "link")])
