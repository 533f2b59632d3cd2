"""Curves over executed tool calls, and means over seeds with intervals and paired tests.

A seed is one observation: its tasks, its cold start and all draws depend on it. So runs of the same seed are compared,
and nothing else counts as independent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.evaluation.pass_at_k import CONFIDENCE

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of one run over its tool calls, linear between evaluations."""

    calls: Floats
    """float64[n], cumulative executed tool calls, rising from 0."""
    values: Floats
    """float64[n], the metric."""

    def at(self, calls: Floats | float) -> Floats:
        """Return the metric after `calls` tool calls; beyond the end, the last value."""
        return np.asarray(np.interp(calls, self.calls, self.values), np.float64)


def mean_curve(curves: Sequence[Curve], points: int) -> Curve:
    """Return the mean over seeds on a grid of `points`, up to the end of the shortest curve."""
    grid = np.linspace(0.0, min(float(curve.calls[-1]) for curve in curves), points)
    return Curve(grid, np.mean([curve.at(grid) for curve in curves], axis=0))


def common_budget(curves: Mapping[str, Sequence[Curve]]) -> float:
    """Return the number of calls that every run has made."""
    return min(float(curve.calls[-1]) for group in curves.values() for curve in group)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, with Student's interval at `CONFIDENCE` and a t-test of the mean against 0.

    A percentile bootstrap of five values covers their mean in about 84 % of cases at a nominal 95 %.
    """

    value: float
    low: float
    """Lower end of the interval; the mean itself for one seed."""
    high: float
    """Upper end of the interval; the mean itself for one seed."""
    p: float
    """p of the two-sided test; NaN for one seed. For differences of pairs it is that of the paired t-test."""
    seeds: int

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 0; False for one seed."""
        return self.low > 0 or self.high < 0

    @classmethod
    def over_seeds(cls, values: Sequence[float] | Floats) -> "Estimate":
        """Estimate from one value per seed."""
        from scipy.stats import ttest_1samp

        mean = float(np.mean(values))
        if len(values) < 2:
            return cls(mean, mean, mean, np.nan, len(values))
        if np.ptp(values) == 0:  # no spread to test with
            return cls(mean, mean, mean, float(mean == 0), len(values))
        found = ttest_1samp(values, 0.0)
        ends = found.confidence_interval(CONFIDENCE)
        return cls(mean, float(ends.low), float(ends.high), float(found.pvalue), len(values))


def compare_at(
    arm: Sequence[Curve], control: Sequence[Curve], calls: float, control_calls: float | None = None
) -> Estimate:
    """Estimate how far an arm at `calls` is above its control at `control_calls`, by default at the same calls.

    Raises:
        ValueError: the numbers of seeds differ.
    """
    other = calls if control_calls is None else control_calls
    return Estimate.over_seeds([float(a.at(calls) - c.at(other)) for a, c in zip(arm, control, strict=True)])
