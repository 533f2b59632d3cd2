"""Advice on a run: each rule speaks when its metric is bad, and a healthy run gets none."""

from typing import Any

import pytest

from arpo_megatron.view.advice import advice

HEALTHY = {
    "trees": 16,
    "groups_without_signal": 3,
    "entropy_mean": 0.5,
    "logprob_gap": 1e-5,
    "seconds/rollout": 6.0,
    "seconds/update": 4.0,
    "dropped/failed": 0,
    "dropped/stale": 0,
    "cached_prompt_share": 0.9,
    "predicted_cached_share": 0.85,
    "requests_repeated": 0,
    "tool_calls_executed": 100,
    "trajectories": 128,
    "updates_skipped": 0,
    "trees_not_stored": 0,
}
FAST_TREE = {"tools": {"ok": 20}, "tool_errors": 0, "tool_seconds": 2.0, "seconds": 5.0, "leaves": 8}


def metrics_of(*bad: dict[str, Any]) -> set[str]:
    """Return the metrics of the advice on a run whose later half has the bad values."""
    rows = [{"step": step, **HEALTHY} for step in range(1, 11)]
    rows += [{"step": step, **HEALTHY, **values} for step, values in enumerate(bad * 10, start=11)]
    return {each.metric for each in advice(rows, [], [FAST_TREE], {})}


def test_healthy_run_gets_no_advice() -> None:
    assert metrics_of({}) == set()
    assert advice([], [], [], {}) == []


@pytest.mark.parametrize(
    ("bad", "metric"),
    [
        ({"entropy_mean": 0.1}, "entropy_mean"),
        ({"groups_without_signal": 12}, "groups_without_signal"),
        ({"trees": 40, "dropped/no_signal": 24}, "groups_without_signal"),
        ({"logprob_gap": 0.3}, "logprob_gap"),
        ({"seconds/rollout": 1.0}, "seconds/rollout"),
        ({"seconds/rollout": 60.0}, "seconds/rollout"),
        ({"dropped/failed": 3}, "dropped/failed"),
        ({"dropped/stale": 3}, "dropped/stale"),
        ({"cached_prompt_share": 0.5}, "cached_prompt_share"),
        ({"trajectories_lost": 8, "tool_calls_failed": 9}, "trajectories_lost"),
        ({"requests_repeated": 40}, "requests_repeated"),
        ({"updates_skipped": 1}, "updates_skipped"),
        ({"trees_not_stored": 5}, "trees_not_stored"),
    ],
)
def test_bad_metric_gets_its_advice_alone(bad: dict[str, Any], metric: str) -> None:
    assert metrics_of(bad) == {metric}


@pytest.mark.parametrize(("solved", "title"), [(11, "Most tasks are solved already"), (2, "Most tasks teach nothing")])
def test_tasks_that_are_solved_are_told_apart_from_those_that_fail(solved: int, title: str) -> None:
    bad = {**HEALTHY, "groups_without_signal": 12, "groups_solved": solved}
    (found,) = advice([{"step": step, **bad} for step in range(1, 6)], [], [], {})
    assert found.title == title


def test_idle_engines_are_no_surprise_if_trees_grow_ahead() -> None:
    rows = [{"step": step, **HEALTHY, "seconds/rollout": 1.0} for step in range(1, 11)]
    assert advice(rows, [], [], {"rollout.max_staleness": 1}) == []


def test_trees_that_grow_ahead_are_not_advised_to_a_run_that_has_them() -> None:
    rows = [{"step": step, **HEALTHY, "seconds/rollout": 60.0} for step in range(1, 11)]
    (without,) = advice(rows, [], [], {})
    (ahead,) = advice(rows, [], [], {"rollout.max_staleness": 1})
    assert without.remedy.startswith(ahead.remedy) and "max_staleness=1" in without.remedy
    assert ahead.remedy == "add engines (engine.replicas)"


def test_held_out_success_must_fall_by_more_than_noise() -> None:
    def metrics(last: float) -> list[str]:
        solved = {str(number): True for number in range(300)}
        results = [{"step": 10, "success": 0.8, "solved": solved}, {"step": 20, "success": last, "solved": solved}]
        return [each.metric for each in advice([], results, [], {})]

    assert metrics(0.76) == []
    assert metrics(0.7) == ["held_out_success"]


def test_slow_and_failing_tools_are_named() -> None:
    slow = {**FAST_TREE, "tool_seconds": 60.0, "seconds": 10.0}
    failing = {**FAST_TREE, "tools": {"ok": 4, "error": 16}, "tool_errors": 16}
    assert [each.title for each in advice([], [], [slow], {})] == ["Tools are slow"]
    assert [each.title for each in advice([], [], [failing], {})] == ["Most tool calls fail"]
