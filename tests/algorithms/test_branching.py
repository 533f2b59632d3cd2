"""Branch decisions: the paper's formula, the released scale, seeded draws, and bounds that always hold."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.algorithms.branching import (
    ArpoPolicy,
    ArpoReleasedPolicy,
    ForkPoint,
    GrpoPolicy,
    RandomPolicy,
    make_branch_policy,
    uniform_draw,
)
from arpo_megatron.algorithms.branching.aepo import AepoPolicy
from arpo_megatron.algorithms.branching.aepo_released import AepoReleasedPolicy
from arpo_megatron.algorithms.branching.base import Probe, initial_budgets, split_budget
from arpo_megatron.algorithms.branching.random_forks import arpo_chance, at_rate, rate_of_step
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.tree import Float32Array, Role, RolloutTree

CONFIG = AlgorithmConfig(
    group_size=16, initial_rollouts=8, beam_size=2, branch_probability=0.5, entropy_weight=0.2, entropy_tokens=4
)
POLICY = ArpoPolicy(CONFIG, vocabulary_size=1000, seed=3)
BRANCHING = ("aepo", "aepo_released", "aepo_scripts", "arpo", "arpo_released", "random")

entropies = st.lists(st.floats(0, 7, width=32), min_size=1, max_size=8).map(lambda x: np.array(x, np.float32))
paths = st.lists(st.integers(0, 20), min_size=1, max_size=8).map(tuple)


def point(start: Float32Array, after: Float32Array, **fields: Any) -> ForkPoint:
    return replace(ForkPoint("task", 1, (0, 0, 0), start, start, after, budget=8), **fields)


def named(name: Any, **fields: Any) -> AlgorithmConfig:
    return replace(CONFIG, branching=name, **fields)


def array(*values: float) -> Float32Array:
    return np.array(values, np.float32)


def test_arpo_fork_probability_is_the_papers_on_the_released_scale() -> None:
    record = POLICY.decide(point(array(1, 2, 3, 4, 99), array(2, 3, 4, 5, 99))).record
    rise = (2 + 3 + 4 + 5 - 1 - 2 - 3 - 4) / math.log(1000)  # only the first k = 4 tokens count
    assert record.dH == pytest.approx(rise)
    assert record.probability == pytest.approx(0.5 + 0.2 * rise)


def test_entropy_of_fewer_than_k_tokens_is_extrapolated_by_the_mean() -> None:
    record = POLICY.decide(point(array(1, 1, 1, 1), array(3, 3))).record
    assert record.dH == pytest.approx(4 * 2 / math.log(1000))


def test_arpo_forks_if_the_draw_is_below_the_probability() -> None:
    for step in range(50):
        decision = POLICY.decide(point(array(1), array(1), step=step))
        assert decision.record.probability == 0.5
        assert decision.siblings == (1 if decision.record.draw < 0.5 else 0)


def test_arpo_threshold_replaces_the_draw() -> None:
    policy = ArpoPolicy(replace(CONFIG, threshold=0.6), vocabulary_size=1000, seed=3)
    rising = policy.decide(point(array(0, 0, 0, 0), array(2, 2, 2, 2)))
    flat = policy.decide(point(array(1, 1, 1, 1), array(1, 1, 1, 1)))
    assert (rising.siblings, rising.record.why) == (1, "threshold")
    assert (flat.siblings, flat.record.why) == (0, "threshold")


def test_arpo_fork_probability_grows_with_entropy() -> None:
    chances = [POLICY.decide(point(array(2), array(level))).record.probability for level in np.linspace(0, 7, 30)]
    assert chances == sorted(chances)
    assert chances[0] >= 0.0
    assert chances[-1] <= 1.0


@given(entropies, entropies, st.integers(0, 8), st.integers(2, 5), st.floats(0, 1))
def test_forks_never_exceed_budget_and_beam(
    start: Float32Array, after: Float32Array, budget: int, beam: int, alpha: float
) -> None:
    for name in BRANCHING:
        config = named(name, beam_size=beam, branch_probability=alpha)
        policy = make_branch_policy(config, vocabulary_size=50, seed=0)
        decision = policy.decide(point(start, after, before_entropies=after, budget=budget))
        assert 0 <= decision.siblings <= budget
        assert 1 + decision.siblings <= beam
        assert 0 <= decision.record.probability <= 1


@given(entropies, entropies, st.integers(0, 2**32), st.integers(0, 10**6), st.text(), paths)
def test_decisions_are_a_function_of_the_seed(
    start: Float32Array, after: Float32Array, seed: int, step: int, task_id: str, path: tuple[int, ...]
) -> None:
    asked = ForkPoint(task_id, step, path, start, after, after, budget=3)
    for name in BRANCHING:
        first, second = (make_branch_policy(named(name), vocabulary_size=64, seed=seed).decide(asked) for _ in range(2))
        assert first == second


def test_draws_are_uniform_and_differ_by_every_key() -> None:
    draws = [uniform_draw(0, 0, "task", (place, 0)) for place in range(2000)]
    assert abs(np.mean(draws) - 0.5) < 0.03
    assert min(draws) >= 0
    assert max(draws) < 1
    variants = {
        uniform_draw(1, 1, "a", (0,)),
        uniform_draw(2, 1, "a", (0,)),
        uniform_draw(1, 2, "a", (0,)),
        uniform_draw(1, 1, "b", (0,)),
        uniform_draw(1, 1, "a", (1,)),
        uniform_draw(1, 1, "a", (0, 0)),
    }
    assert len(variants) == 6


def test_decision_without_budget_records_why() -> None:
    policy = ArpoPolicy(replace(CONFIG, branch_probability=1.0), vocabulary_size=50, seed=0)
    assert policy.decide(point(array(1), array(1), budget=0)).record.why == "budget spent"


def test_branch_policies_are_built_by_name() -> None:
    assert make_branch_policy(CONFIG, vocabulary_size=9, seed=0) == ArpoPolicy(CONFIG, 9, 0)
    grpo = make_branch_policy(replace(CONFIG, branching="grpo"), vocabulary_size=9, seed=0)
    assert grpo == GrpoPolicy(16)
    assert make_branch_policy(named("random"), vocabulary_size=9, seed=2) == RandomPolicy(named("random"), 9, 2)
    released = make_branch_policy(named("arpo_released"), vocabulary_size=9, seed=2)
    assert released == ArpoReleasedPolicy(named("arpo_released"), 9, 2)
    assert (grpo.initial, grpo.total, grpo.measured_tokens) == (16, 16, 0)
    assert (POLICY.initial, POLICY.total, POLICY.measured_tokens) == (8, 16, 4)


def test_policies_measure_nothing_if_no_fork_is_possible() -> None:
    assert ArpoPolicy(replace(CONFIG, beam_size=1), 9, 0).measured_tokens == 0
    assert ArpoPolicy(replace(CONFIG, initial_rollouts=16), 9, 0).measured_tokens == 0


@given(st.integers(0, 100), st.integers(1, 20))
def test_split_budget_is_even_and_complete(forks: int, paths: int) -> None:
    reserved = split_budget(forks, paths)
    assert len(reserved) == paths
    assert sum(reserved) == forks
    assert max(reserved) - min(reserved) <= 1
    assert reserved == sorted(reserved, reverse=True)


def released_branches(draw: float, before: list[float], start: list[float], vocabulary: int) -> bool:
    """Reproduce the released code's decision: fork when clip(u - w dH, 0, 1) <= p."""
    now, initial = (sum(values[:20]) / math.log(vocabulary) for values in (before, start))
    return float(np.clip(draw - 0.2 * (now - initial), 0, 1)) <= 0.5


@given(entropies, entropies, entropies, st.integers(0, 500))
def test_arpo_released_equals_the_released_arithmetic(
    start: Float32Array, before: Float32Array, after: Float32Array, step: int
) -> None:
    policy = ArpoReleasedPolicy(named("arpo_released"), vocabulary_size=1000, seed=3)
    decision = policy.decide(point(start, after, before_entropies=before, step=step))
    expected = released_branches(decision.record.draw, before.tolist(), start.tolist(), 1000)
    chance = decision.record.probability
    assert decision.siblings == int(expected) or abs(decision.record.draw - chance) < 1e-6


def test_arpo_released_is_one_round_late_and_does_not_extrapolate() -> None:
    policy = ArpoReleasedPolicy(named("arpo_released"), vocabulary_size=1000, seed=3)
    start = array(2, 2, 2, 2)
    first = policy.decide(point(start, array(9, 9, 9, 9)))  # before_entropies are the first segment's
    assert (first.record.dH, first.record.probability) == (0.0, 0.5)
    second = policy.decide(point(start, array(9, 9, 9, 9), before_entropies=array(3)))
    assert second.record.dH == pytest.approx((3 - 8) / math.log(1000))


def test_random_policy_forks_like_arpo_without_entropy() -> None:
    arpo = ArpoPolicy(replace(CONFIG, entropy_weight=0.0), vocabulary_size=1000, seed=3)
    control = RandomPolicy(named("random"), vocabulary_size=1000, seed=3)
    forks = 0
    for step in range(200):
        asked = point(array(1), array(9), step=step)
        with_entropy, without = arpo.decide(asked), control.decide(asked)
        assert with_entropy.siblings == without.siblings
        assert with_entropy.record.draw == without.record.draw
        assert (without.record.dH, without.record.probability) == (with_entropy.record.dH, 0.5)
        forks += without.siblings
    assert 70 < forks < 130


def test_random_policy_forks_at_the_rate_of_another_run() -> None:
    config = named("random", params={"fork_rate": 0.2})
    policy = make_branch_policy(config, vocabulary_size=1000, seed=3)
    decisions = [policy.decide(point(array(1), array(9), step=step)) for step in range(400)]
    assert {each.record.probability for each in decisions} == {0.2}
    assert 50 < sum(each.siblings for each in decisions) < 110


@pytest.mark.parametrize("threshold", [None, 0.6])
def test_matched_rate_is_the_share_of_forks_that_arpo_would_want(threshold: float | None) -> None:
    config = named("random", entropy_weight=2.0, threshold=threshold)
    arpo = ArpoPolicy(config, vocabulary_size=1000, seed=3)
    random_arm = make_branch_policy(config, vocabulary_size=1000, seed=3)
    rng, wanted, trees = np.random.default_rng(5), 0.0, []
    for step in range(20):
        tree, tool = RolloutTree("task", [1]), 0
        for _ in range(step % 3 + 1):
            asked = point(rng.exponential(1, 4).astype(np.float32), rng.exponential(1, 4).astype(np.float32), step=step)
            record = arpo.decide(asked).record
            wanted += record.probability if threshold is None else record.probability > threshold
            branch = random_arm.decide(asked).record
            assert branch.probability == config.branch_probability, "the rate of the first step"
            tool = tree.add(tool, Role.TOOL, [2])
            tool = tree.add(tool, Role.MODEL, [3], branch=branch)
        trees.append(tree)
    assert arpo_chance(trees, config) == pytest.approx(wanted / sum(step % 3 + 1 for step in range(20)))
    assert arpo_chance([RolloutTree("task", [1])], config) is None
    assert make_branch_policy(at_rate(config, 0.3), vocabulary_size=9, seed=0).decide(asked).record.probability == 0.3


def test_rate_of_a_step_is_that_of_the_last_step_with_fork_points() -> None:
    assert [rate_of_step([0.2, None, 0.4], step) for step in range(4)] == [None, 0.2, 0.2, 0.4]


def test_released_code_draws_for_every_copy() -> None:
    policy = ArpoReleasedPolicy(named("arpo_released", beam_size=4), vocabulary_size=1000, seed=3)
    siblings = [policy.decide(point(array(1), array(1), step=step)).siblings for step in range(400)]
    shares = np.bincount(siblings, minlength=4) / 400
    assert shares == pytest.approx(np.array([1, 3, 3, 1]) / 8, abs=0.07)  # three draws at 0.5
    assert policy.decide(point(array(1), array(1), budget=0)).siblings == 0


def test_aepo_released_rounds_down_and_adds_one() -> None:
    policy = AepoReleasedPolicy(CONFIG, vocabulary_size=1000, seed=0)
    low, high = array(1, 1), array(9, 9)
    root, mean = 18 / math.log(1000), (18 + 2 + 2) / 3 / math.log(1000)
    assert policy.plan(Probe(high, (low, low))) == int(16 / (1 + math.exp(-0.5 * (root - mean)))) + 1
    assert policy.plan(Probe(high, ())) == 16 // 2 + 1
    steep = replace(policy, probe_slope=1e3)
    assert (steep.plan(Probe(low, (high,))), steep.plan(Probe(high, (low,)))) == (2, 16)


def test_aepo_starts_more_trajectories_if_the_question_is_less_certain_than_the_tools() -> None:
    policy = AepoPolicy(CONFIG, vocabulary_size=1000, seed=0, probe_slope=2.0)
    low, high = array(0.5, 0.5, 0.5, 0.5), array(3, 3, 3, 3)
    share = 1 / (1 + math.exp(-2.0 * (12 - (2 + 12) / 2) / math.log(1000)))
    assert policy.plan(Probe(high, (low, high))) == round(16 * share)
    assert policy.plan(Probe(low, (high,))) < 8 < policy.plan(Probe(high, (low,)))
    assert policy.plan(Probe(high, ())) == 8
    steep = replace(policy, probe_slope=1e3)
    assert (steep.plan(Probe(low, (high,))), steep.plan(Probe(high, (low,)))) == (2, 16)
    assert initial_budgets(policy, 4) == [0, 4, 4, 4]


def test_aepo_consecutive_forks_lower_the_chance() -> None:
    policy = AepoPolicy(CONFIG, vocabulary_size=1000, seed=0, streak_penalty=0.25)
    chances = [policy.decide(point(array(1), array(1), streak=streak)).record.probability for streak in range(6)]
    assert chances == pytest.approx([0.5, 0.375, 0.25, 0.125, 0.0, 0.0])


@given(entropies, entropies, entropies, st.integers(0, 500), st.integers(0, 25))
def test_aepo_released_equals_the_released_arithmetic(
    start: Float32Array, before: Float32Array, after: Float32Array, step: int, streak: int
) -> None:
    policy = AepoReleasedPolicy(named("aepo_released"), vocabulary_size=1000, seed=3)
    decision = policy.decide(point(start, after, before_entropies=before, step=step, streak=streak))
    now, initial = (sum(values.tolist()[:20]) / math.log(1000) for values in (before, start))
    weighed = (1 - decision.record.draw + 0.2 * (now - initial)) * max(0.0, 1 - 0.05 * streak)
    expected = float(np.clip(weighed, 0, 1)) >= 0.5
    assert decision.siblings == int(expected) or abs(weighed - 0.5) < 1e-6
    assert (decision.record.draw < decision.record.probability) == expected or abs(weighed - 0.5) < 1e-6
