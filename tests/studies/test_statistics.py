"""Curves, intervals and paired tests against independent computations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.studies.statistics import (
    Curve,
    Mean,
    Paired,
    budget_of,
    calls_to_reach,
    compare,
    mean_curve,
    share_of_calls,
)


def curve(*points: tuple[float, float]) -> Curve:
    calls, values = np.array(points, np.float64).T
    return Curve(calls, values)


values = st.lists(st.floats(-1, 1), min_size=2, max_size=6)


@given(values=values, share=st.floats(0.05, 1.0))
def test_the_mean_until_a_budget_is_the_integral_over_it(values: list[float], share: float) -> None:
    one = curve(*((100.0 * place, value) for place, value in enumerate(values)))
    budget = share * float(one.calls[-1])
    points = (np.arange(20_000) + 0.5) * budget / 20_000  # midpoints
    assert one.mean_until(budget) == pytest.approx(float(np.mean(one.at(points))), abs=1e-3)


def test_a_curve_is_linear_between_evaluations_and_flat_behind_the_last() -> None:
    one = curve((0, 0.2), (100, 0.4), (300, 0.8))
    assert [float(one.at(calls)) for calls in (0, 50, 200, 300, 900)] == pytest.approx([0.2, 0.3, 0.6, 0.8, 0.8])
    assert one.mean_until(300) == pytest.approx((0.3 * 100 + 0.6 * 200) / 300)


@given(values=values, goal=st.floats(-1, 1))
def test_the_curve_has_the_goal_where_it_is_first_reached(values: list[float], goal: float) -> None:
    one = curve(*((10.0 * place, value) for place, value in enumerate(values)))
    calls = calls_to_reach(one, goal)
    if calls is None:
        assert max(values) < goal
    elif calls == 0:
        assert values[0] >= goal
    else:
        assert float(one.at(calls)) == pytest.approx(goal, abs=1e-6)
        before = one.at(np.linspace(0, calls * (1 - 1e-6), 50))
        assert (before <= goal + 1e-6).all()


def test_a_share_of_calls_is_told_where_the_control_improves_and_its_end_is_reached() -> None:
    control = curve((0, 0.2), (200, 0.6))
    assert share_of_calls(curve((0, 0.2), (100, 1.0)), control) == pytest.approx(0.25)
    assert share_of_calls(curve((0, 0.2), (100, 0.5)), control) is None
    assert share_of_calls(curve((0, 0.2), (100, 1.0)), curve((0, 0.2), (200, 0.2))) is None


def test_the_mean_curve_ends_with_the_first_run_that_ends() -> None:
    mean = mean_curve([curve((0, 0.0), (100, 1.0)), curve((0, 0.0), (200, 1.0))], points=3)
    assert mean.calls.tolist() == [0, 50, 100]
    assert mean.values.tolist() == pytest.approx([0, 0.375, 0.75])


def test_the_paired_test_is_students() -> None:
    arm, control = [0.61, 0.70, 0.66, 0.72, 0.69], [0.58, 0.66, 0.67, 0.65, 0.60]
    gain = Paired.of(arm, control)
    differences = [a - b for a, b in zip(arm, control, strict=True)]
    mean = sum(differences) / 5
    error = math.sqrt(sum((d - mean) ** 2 for d in differences) / 4 / 5)
    t, quantile = mean / error, 2.7764451  # of Student's t with 4 degrees of freedom at 0.975
    x = t / math.sqrt(4 + t**2)
    p = 1 - x * (3 - x**2) / 2  # two-sided, from the distribution function with 4 degrees of freedom in closed form
    assert (gain.difference, gain.p) == pytest.approx((mean, p))
    assert (gain.low, gain.high) == pytest.approx((mean - quantile * error, mean + quantile * error), rel=1e-5)


def test_one_seed_has_no_test_and_equal_arms_no_difference() -> None:
    assert math.isnan(Paired.of([0.5], [0.4]).p)
    assert Paired.of([0.5, 0.6], [0.5, 0.6]).p == 1.0
    with pytest.raises(ValueError, match="no pairs"):
        Paired.of([0.5, 0.6], [0.5])


def test_the_interval_over_five_seeds_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    found = [Mean.of(rng.normal(size=5).tolist()) for _ in range(4000)]
    assert all(mean.low <= mean.value <= mean.high for mean in found)
    assert 0.94 <= np.mean([mean.low <= 0 <= mean.high for mean in found]) <= 0.96


def test_the_interval_of_one_seed_or_of_equal_ones_is_their_mean() -> None:
    assert Mean.of([0.4]) == Mean(0.4, 0.4, 0.4)
    assert Mean.of([0.5, 0.5, 0.5]) == Mean(0.5, 0.5, 0.5)


def test_arms_are_compared_at_the_calls_that_all_have_made() -> None:
    curves = {
        "control": [curve((0, 0.0), (400, 0.8)), curve((0, 0.2), (400, 0.6))],
        "arm": [curve((0, 0.0), (200, 0.6)), curve((0, 0.2), (220, 0.75))],
    }
    budget = budget_of(curves)
    assert budget == 200
    control, arm = compare(curves, "control", budget, {"control": 4, "arm": 4})
    assert (control.calls_a_step, arm.calls_a_step) == (100, 52.5)
    assert control.final.value == pytest.approx(0.4)
    assert control.final_gain is None
    assert arm.final_gain is not None
    assert arm.final_gain.difference == pytest.approx(((0.6 - 0.4) + (0.7 - 0.4)) / 2)
    assert arm.area_gain is not None
    assert arm.area_gain.difference == pytest.approx(((0.3 - 0.2) + (0.45 - 0.3)) / 2)
