"""Group advantages: the formula, its invariances, and refused rewards."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.algorithms.advantages.group import group_advantages

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=20)


@given(rewards)
def test_group_advantages_equal_the_formula_with_unbiased_deviation(values: list[float]) -> None:
    mean, std = statistics.fmean(values), statistics.stdev(values)
    expected = [(value - mean) / (std + 1e-6) for value in values]
    # Rounding of the mean is divided by 1e-6 where a group is almost constant.
    np.testing.assert_allclose(group_advantages(values), expected, rtol=1e-6, atol=1e-8)


@given(rewards, st.floats(-5, 5))
def test_group_advantages_ignore_a_constant_added_to_all_rewards(values: list[float], shift: float) -> None:
    shifted = group_advantages([value + shift for value in values])
    np.testing.assert_allclose(shifted, group_advantages(values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("values", [[], [0.7], [0.1, 0.1, 0.1], [-1.0] * 16])
def test_group_advantages_are_exactly_zero_for_equal_rewards(values: list[float]) -> None:
    result = group_advantages(values)
    assert result.dtype == np.float64
    assert result.tolist() == [0.0] * len(values)


@pytest.mark.parametrize("values", [[1.0, math.nan], [1.0, math.inf], [[1.0, 2.0]]])
def test_group_advantages_refuse_rewards_that_are_not_a_finite_vector(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(values)
