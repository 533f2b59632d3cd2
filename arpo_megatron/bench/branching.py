"""Executed tool calls and depth of forks, by the real policies and fork budgets on simulated paths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from arpo_megatron.algorithms.branching import (
    BranchPolicy,
    ForkPoint,
    Grant,
    PathForks,
    PathKey,
    make_branch_policy,
    make_fork_budget,
)
from arpo_megatron.config import AlgorithmConfig

CALLS = (1, 2, 3, 6)
Uncertain = Literal["always", "early", "late"]
UNCERTAIN: tuple[Uncertain, ...] = ("always", "early", "late")
_VOCABULARY = 1000
_SPREAD = 1.0
"""Standard deviation of dH between fork points."""
_TREND = 2.0
"""dH of `early` falls from +trend at a path's first fork point to -trend at its last; that of `late` rises."""


@dataclass(frozen=True, slots=True)
class SimulatedTree:
    """Cost and forks of a tree of the simulation."""

    executed_calls: int
    fork_depths: Sequence[int]
    """For each fork, the number of calls on the path before it."""
    forks_of_leaves: Sequence[int]
    """For each trajectory, the fork points on its path."""


def bench_branching(trees: int = 300, group_size: int = 16, initial: int = 8, seed: int = 1) -> dict[str, Any]:
    """Compare pooled and reserved forks for tasks with 1, 2, 3 and 6 calls per path.

    dH of a fork point is normal around 0 (`always`), or falls (`early`) or rises (`late`) along the path; chances and
    draws are those of `arpo`.

    Returns:
        For each number of calls, profile and budget: `calls_over_grpo`, executed calls over those of `group_size`
        independent trajectories; `fork_depth`, mean number of calls before a fork; `two_forks`, share of trajectories
        with two fork points or more.
    """
    rows = []
    for calls in CALLS:
        for uncertain in UNCERTAIN:
            row: dict[str, Any] = {"calls": calls, "uncertain": uncertain}
            for budget in ("pooled", "reserved"):
                config = AlgorithmConfig(group_size=group_size, initial_rollouts=initial, fork_budget=budget)
                policy = make_branch_policy(config, vocabulary_size=_VOCABULARY, seed=seed)
                grown = [simulate(policy, calls, uncertain, f"{calls}-{uncertain}-{n}", seed) for n in range(trees)]
                depths = [depth for tree in grown for depth in tree.fork_depths]
                forks = [count for tree in grown for count in tree.forks_of_leaves]
                row[budget] = {
                    "calls_over_grpo": sum(tree.executed_calls for tree in grown) / (trees * group_size * calls),
                    "fork_depth": float(np.mean(depths)) if depths else 0.0,
                    "two_forks": float(np.mean([count >= 2 for count in forks])),
                }
            rows.append(row)
    return {"trees": trees, "group_size": group_size, "initial_rollouts": initial, "rows": rows}


@dataclass(slots=True)
class _Path:
    key: PathKey
    """Index of the trajectory, 0 for each call, n for the n-th sibling."""
    forks: PathForks
    calls: int = 0
    """Calls that were made on the path, those before its fork included."""
    above: int = 0
    """Fork points on the path."""


def simulate(policy: BranchPolicy, calls: int, uncertain: Uncertain, task_id: str, seed: int) -> SimulatedTree:
    """Grow a tree in which every path makes `calls` calls."""
    budget, k = make_fork_budget(policy), policy.measured_tokens
    rng = np.random.default_rng([seed, *task_id.encode()])
    running = [_Path((n,), forks) for n, forks in enumerate(budget.start(policy.initial))]
    measured: dict[PathKey, _Path] = {}
    executed, depths, leaves = 0, list[int](), list[_Path]()

    def start(grants: Sequence[Grant]) -> None:
        for grant in grants:
            path = measured.pop(grant.path)
            depth = grant.path[1:].count(0)
            depths.extend([depth] * len(grant.siblings))
            path.above += bool(grant.siblings)
            for n, forks in enumerate(grant.siblings, start=1):
                running.append(_Path((*grant.path, n), forks, depth, path.above))

    while running:
        path = running.pop(0)
        if path.calls == calls:
            leaves.append(path)
            end = budget.end(path.forks, path.key, failed=False)
            start(end.grants)
            running += [_Path(key, forks) for key, forks in end.fresh]
            continue
        executed += 1
        path.calls += 1
        path.key = (*path.key, 0)
        if k and budget.may_fork(path.forks):
            measured[path.key] = path
            start(budget.measure(path.forks, _point(task_id, path, calls, uncertain, rng, k)))
        running.append(path)
    return SimulatedTree(executed, depths, [path.above for path in leaves])


def _point(task_id: str, path: _Path, calls: int, uncertain: Uncertain, rng: np.random.Generator, k: int) -> ForkPoint:
    along = 1 - 2 * (path.calls - 1) / max(1, calls - 1) if calls > 1 else 0.0
    rise = rng.normal({"always": 0.0, "early": _TREND, "late": -_TREND}[uncertain] * along, _SPREAD)
    start = np.full(k, 10.0, np.float32)
    after = start + np.float32(rise * np.log(_VOCABULARY) / k)
    return ForkPoint(task_id, 0, path.key, start, start, after)
