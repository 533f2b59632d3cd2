"""Curves over executed tool calls, means over seeds with their intervals, and paired tests.

A seed is one observation: its tasks, its cold start and all draws depend on it. So runs of the same seed are compared,
and nothing else counts as independent.
"""

import math
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


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's interval of the mean at `CONFIDENCE`; both ends are the mean if there is one value.

    A percentile bootstrap of five values covers their mean in about 84 % of cases at a nominal 95 %.
    """
    from scipy.stats import t

    data = np.asarray(values, np.float64)
    mean = float(data.mean())
    if len(data) < 2:
        return mean, mean
    error = float(data.std(ddof=1)) / math.sqrt(len(data))
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(data) - 1)) * error
    return mean - half, mean + half


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds with its `interval`."""

    value: float
    low: float
    high: float

    @classmethod
    def over_seeds(cls, values: Sequence[float]) -> "Mean":
        """Compute the mean of one value per seed."""
        low, high = interval(values)
        return cls(float(np.mean(values)), low, high)


@dataclass(frozen=True, slots=True)
class PairedTest:
    """The difference between an arm and its control in the same seeds."""

    difference: float
    """Mean difference."""
    low: float
    """Lower end of Student's interval of the difference at `CONFIDENCE`; NaN for one seed."""
    high: float
    """Upper end of that interval; NaN for one seed."""
    p: float
    """p of the two-sided paired t-test; NaN for one seed, 1 if every difference is 0."""
    seeds: int
    """Number of pairs."""

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 0; False for one seed."""
        return self.low > 0 or self.high < 0

    @classmethod
    def compare(cls, arm: Sequence[float], control: Sequence[float]) -> "PairedTest":
        """Test one value per seed, in the same order of seeds.

        Raises:
            ValueError: the numbers of values differ.
        """
        from scipy.stats import ttest_rel

        if len(arm) != len(control):
            raise ValueError(f"{len(arm)} seeds of an arm do not pair with {len(control)} of its control")
        differences = np.subtract(arm, control, dtype=np.float64)
        mean = float(differences.mean())
        if len(differences) < 2:
            return cls(mean, np.nan, np.nan, np.nan, len(differences))
        if np.ptp(differences) == 0:  # no spread to test with
            return cls(mean, mean, mean, 1.0 if mean == 0 else 0.0, len(differences))
        found = ttest_rel(arm, control)
        ends = found.confidence_interval(CONFIDENCE)
        return cls(mean, float(ends.low), float(ends.high), float(found.pvalue), len(differences))


def compare_at(
    arm: Sequence[Curve], control: Sequence[Curve], calls: float, control_calls: float | None = None
) -> PairedTest:
    """Test an arm at `calls` against its control at `control_calls`, by default at the same calls."""
    other = calls if control_calls is None else control_calls
    return PairedTest.compare([float(curve.at(calls)) for curve in arm], [float(curve.at(other)) for curve in control])
