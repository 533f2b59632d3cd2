"""Curves, intervals and paired tests against independent computations."""

import math

import numpy as np
import pytest

from arpo_megatron.studies.curves import Curve, Estimate, common_budget, compare_at, mean_curve


def curve(*points: tuple[float, float]) -> Curve:
    calls, values = np.array(points, np.float64).T
    return Curve(calls, values)


def test_curve_is_linear_between_evaluations_and_flat_after_the_last() -> None:
    one = curve((0, 0.2), (100, 0.4), (300, 0.8))
    assert [float(one.at(calls)) for calls in (0, 50, 200, 300, 900)] == pytest.approx([0.2, 0.3, 0.6, 0.8, 0.8])


def test_mean_curve_ends_with_the_shortest_curve() -> None:
    mean = mean_curve([curve((0, 0.0), (100, 1.0)), curve((0, 0.0), (200, 1.0))], points=3)
    assert mean.calls.tolist() == [0, 50, 100]
    assert mean.values.tolist() == pytest.approx([0, 0.375, 0.75])


def test_paired_test_is_students_t_test() -> None:
    arm, control = [0.61, 0.70, 0.66, 0.72, 0.69], [0.58, 0.66, 0.67, 0.65, 0.60]
    gain = compare_at([curve((0, value)) for value in arm], [curve((0, value)) for value in control], 0)
    differences = [a - b for a, b in zip(arm, control, strict=True)]
    mean = sum(differences) / 5
    error = math.sqrt(sum((d - mean) ** 2 for d in differences) / 4 / 5)
    t, quantile = mean / error, 2.7764451  # of Student's t with 4 degrees of freedom at 0.975
    x = t / math.sqrt(4 + t**2)
    p = 1 - x * (3 - x**2) / 2  # two-sided, from the distribution function with 4 degrees of freedom in closed form
    assert (gain.value, gain.p) == pytest.approx((mean, p))
    assert (gain.low, gain.high) == pytest.approx((mean - quantile * error, mean + quantile * error), rel=1e-5)


def test_one_seed_has_no_test_and_equal_arms_have_p_1() -> None:
    assert math.isnan(Estimate.over_seeds([0.1]).p)
    assert Estimate.over_seeds([0.0, 0.0]).p == 1.0
    with pytest.raises(ValueError, match="shorter"):
        compare_at([curve((0, 0.5))] * 2, [curve((0, 0.5))], 0)


def test_interval_over_five_seeds_has_its_nominal_coverage() -> None:
    rng = np.random.default_rng(0)
    found = [Estimate.over_seeds(rng.normal(size=5).tolist()) for _ in range(4000)]
    assert all(mean.low <= mean.value <= mean.high for mean in found)
    assert 0.94 <= np.mean([mean.low <= 0 <= mean.high for mean in found]) <= 0.96


@pytest.mark.parametrize("values", [[0.4], [0.4, 0.4, 0.4]])
def test_interval_of_one_seed_or_equal_seeds_is_their_mean(values: list[float]) -> None:
    found = Estimate.over_seeds(values)
    assert found.low == found.value == found.high == pytest.approx(0.4)


def test_arms_are_compared_at_the_common_budget() -> None:
    curves = {
        "control": [curve((0, 0.0), (400, 0.8)), curve((0, 0.2), (400, 0.6))],
        "arm": [curve((0, 0.0), (200, 0.6)), curve((0, 0.2), (220, 0.75))],
    }
    budget = common_budget(curves)
    assert budget == 200
    gain = compare_at(curves["arm"], curves["control"], budget)
    assert gain.value == pytest.approx(((0.6 - 0.4) + (0.7 - 0.4)) / 2)
    half = compare_at(curves["arm"], curves["control"], budget / 2, budget)
    assert half.value == pytest.approx(((0.3 - 0.4) + (0.45 - 0.4)) / 2)
