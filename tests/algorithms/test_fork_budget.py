"""Fork budgets: the same grants in any order of events, all M trajectories, and forks where the policy wants them."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.algorithms.branching import Decision, ForkPoint, Grant, PathKey
from arpo_megatron.algorithms.branching.budget import ForkBudget, PooledForks, ReservedForks
from arpo_megatron.tree import BranchRecord


class Threshold:
    """Forks where the first entropy exceeds 0.5."""

    def __init__(self, total: int, initial: int) -> None:
        self.total, self.initial, self.measured_tokens = total, initial, 1

    def decide(self, point: ForkPoint) -> Decision:
        siblings = min(1, point.budget) if point.entropies[0] > 0.5 else 0
        return Decision(siblings, BranchRecord(dH=0.0, probability=float(point.entropies[0]), draw=0.0, why="test"))


def play(budget: ForkBudget, initial: int, rng: random.Random, lengths: int, seed: int) -> dict[PathKey, int]:
    """Run all paths of a tree, whose answers arrive in the order of `rng`; return the forks at each point."""
    running = {(n,): path for n, path in enumerate(budget.start(initial))}
    calls = dict.fromkeys(running, 0)
    granted: dict[PathKey, int] = {}
    fresh = 0

    def start(grants: Sequence[Grant]) -> None:
        for grant in grants:
            granted[grant.path] = grant.decision.siblings
            for n, path in enumerate(grant.siblings, start=1):
                key = (*grant.path, n)
                running[key], calls[key] = path, grant.path.count(0)

    while running:
        key = rng.choice(sorted(running))
        path, place = running[key], np.random.default_rng([seed, *key])
        if place.random() < calls[key] / lengths:
            del running[key]
            end = budget.end(path, key, failed=False)
            start(end.grants)
            fresh += len(end.fresh)
            continue
        del running[key]
        longer = (*key, 0)
        running[longer], calls[longer] = path, calls.pop(key) + 1
        if budget.may_fork(path):
            entropies = np.array([np.random.default_rng([seed, 7, *longer]).random()], np.float32)
            start(budget.measure(path, ForkPoint("task", 1, longer, entropies, entropies, entropies)))
    assert initial + fresh + sum(granted.values()) == budget.policy.total
    return granted


@pytest.mark.parametrize("kind", [PooledForks, ReservedForks])
@given(st.integers(2, 12), st.integers(1, 6), st.integers(1, 4), st.integers(0, 999), st.integers(0, 999))
def test_budget_grants_the_same_forks_in_any_order(kind, total, initial, lengths, seed, order) -> None:
    initial = min(initial, total)
    policy = Threshold(total, initial)
    first = play(kind(policy), initial, random.Random(order), lengths, seed)
    assert first == play(kind(policy), initial, random.Random(order + 1), lengths, seed)


def test_pooled_forks_go_to_the_uncertain_path() -> None:
    sure, unsure = np.array([0.1], np.float32), np.array([0.9], np.float32)
    policy = Threshold(total=4, initial=2)
    pool = PooledForks(policy)
    a, b = pool.start(2)
    assert pool.measure(b, ForkPoint("task", 1, (1, 0, 0), unsure, unsure, unsure)) == []  # waits for path a
    assert pool.measure(b, ForkPoint("task", 1, (1, 0, 0, 0, 0), unsure, unsure, unsure)) == []
    grants = pool.measure(a, ForkPoint("task", 1, (0, 0, 0), sure, sure, sure))
    assert [(grant.path, grant.decision.siblings) for grant in grants] == [((0, 0, 0), 0), ((1, 0, 0), 1)]
    grants = pool.end(a, (0, 0, 0), failed=False).grants
    assert grants == []  # the sibling may still reach the second round
    (sibling,) = pool._living[1:]
    end = pool.end(sibling, (1, 0, 1), failed=False)
    assert [(grant.path, grant.decision.siblings) for grant in end.grants] == [((1, 0, 0, 0, 0), 1)]
    assert end.fresh == []
