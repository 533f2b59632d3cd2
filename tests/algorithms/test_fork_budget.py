"""Fork budgets: the same grants in any order of events, all M trajectories, and forks where the policy wants them."""

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.algorithms.branching import Decision, ForkPoint, Grant, PathKey
from arpo_megatron.algorithms.branching.budget import ForkBudget, PooledForks, ReservedForks
from arpo_megatron.tree import BranchRecord


def wants(entropy: float, streak: int) -> bool:
    return entropy > 0.5 + 0.1 * streak


def ends(key: PathKey, lengths: int, seed: int) -> bool:
    """Whether a path makes no further call."""
    return bool(np.random.default_rng([seed, *key]).random() < key[1:].count(0) / lengths)


def entropy_at(key: PathKey, seed: int) -> float:
    return float(np.float32(np.random.default_rng([seed, 7, *key]).random()))


class Threshold:
    """Forks where the first entropy exceeds 0.5, and 0.1 more for each consecutive fork."""

    def __init__(self, total: int, initial: int) -> None:
        self.total, self.initial, self.measured_tokens = total, initial, 1

    def decide(self, point: ForkPoint) -> Decision:
        siblings = min(1, point.budget) if wants(float(point.entropies[0]), point.streak) else 0
        return Decision(siblings, BranchRecord(dH=0.0, probability=float(point.entropies[0]), draw=0.0, why="test"))


def play(budget: ForkBudget, initial: int, rng: random.Random, lengths: int, seed: int) -> dict[PathKey, int]:
    """Run all paths of a tree, whose answers arrive in the order of `rng`; return the forks at each point."""
    running = {(n,): path for n, path in enumerate(budget.start(initial))}
    granted: dict[PathKey, int] = {}
    fresh = 0

    def start(grants: Sequence[Grant]) -> None:
        for grant in grants:
            granted[grant.path] = grant.decision.siblings
            for n, path in enumerate(grant.siblings, start=1):
                running[(*grant.path, n)] = path

    while running:
        key = rng.choice(sorted(running))
        path = running.pop(key)
        if ends(key, lengths, seed):
            end = budget.end(path, key, failed=False)
            start(end.grants)
            fresh += len(end.fresh)
            running |= dict(end.fresh)
            continue
        longer = (*key, 0)
        running[longer] = path
        if budget.may_fork(path):
            entropies = np.array([entropy_at(longer, seed)], np.float32)
            start(budget.measure(path, ForkPoint("task", 1, longer, entropies, entropies, entropies)))
    assert initial + fresh + sum(granted.values()) == budget.policy.total
    return granted


@pytest.mark.parametrize("kind", [PooledForks, ReservedForks, partial(PooledForks, released=True)])
@given(st.integers(2, 12), st.integers(1, 6), st.integers(1, 4), st.integers(0, 999), st.integers(0, 999))
def test_budget_grants_the_same_forks_in_any_order(kind, total, initial, lengths, seed, order) -> None:
    initial = min(initial, total)
    policy = Threshold(total, initial)
    first = play(kind(policy), initial, random.Random(order), lengths, seed)
    assert first == play(kind(policy), initial, random.Random(order + 1), lengths, seed)


def released_rounds(total: int, initial: int, lengths: int, seed: int) -> dict[PathKey, int]:
    """Return the forks at each point by the loop of the released code: one call of all paths per round."""
    active: list[PathKey] = [(n,) for n in range(initial)]
    granted: dict[PathKey, int] = {}
    left, streak, fresh = total - initial, 0, 0
    while active:
        active = [(*key, 0) for key in active if not ends(key, lengths, seed)]
        new: list[PathKey] = []
        for key in active:
            granted[key] = int(left > 0 and wants(entropy_at(key, seed), streak))
            left -= granted[key]
            new += [(*key, 1)] * granted[key]
        if not active and left:
            new, fresh, left = [(initial, 0, fresh)], fresh + 1, left - 1
        streak = streak + 1 if new else 0
        active += new
    return granted if total > initial else {}


@given(st.integers(2, 12), st.integers(1, 6), st.integers(1, 4), st.integers(0, 999), st.integers(0, 999))
def test_released_budget_grants_as_the_released_loop(total, initial, lengths, seed, order) -> None:
    initial = min(initial, total)
    budget = PooledForks(Threshold(total, initial), released=True)
    assert play(budget, initial, random.Random(order), lengths, seed) == released_rounds(total, initial, lengths, seed)


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
