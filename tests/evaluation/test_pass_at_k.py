"""pass@k against enumeration of all draws, and the coverage of bootstrap intervals."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.evaluation.pass_at_k import interval, pass_at_k


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_mean_best_of_all_draws(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    best = [max(draw) for draw in combinations(scores, k)]
    assert pass_at_k(scores, k) == pytest.approx(sum(best) / len(best))


@given(st.integers(1, 40), st.data())
def test_binary_pass_at_k_is_the_unbiased_estimator(count: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, count))
    k = data.draw(st.integers(1, count))
    expected = 1 - comb(count - right, k) / comb(count, k)
    assert pass_at_k([1.0] * right + [0.0] * (count - right), k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [0, 3])
def test_more_draws_than_attempts_are_an_error(k: int) -> None:
    with pytest.raises(ValueError, match="of 2 attempts"):
        pass_at_k([0.0, 1.0], k)


def test_interval_has_its_nominal_coverage() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(60):
        low, high = interval(rng.binomial(1, 0.3, size=80), seed=trial)
        covered += low <= 0.3 <= high
    assert 50 <= covered <= 60


def test_interval_of_equal_values_is_a_point_and_depends_on_the_seed() -> None:
    assert interval([1.0, 1.0, 1.0], seed=1) == (1.0, 1.0)
    assert interval([0.25], seed=1) == (0.25, 0.25)
    values = np.linspace(0, 1, 50)
    assert interval(values, seed=3) == interval(values, seed=3) != interval(values, seed=4)
