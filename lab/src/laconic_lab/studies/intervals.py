"""Means with 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev, variance
from typing import NamedTuple

__all__ = ["Interval", "difference_interval", "mean_interval"]

STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantiles of Student's t for 1 to 15 degrees of freedom; beyond, an expansion is good to three digits."""


class Interval(NamedTuple):
    """A mean with its 95 % confidence interval; low and high equal the mean where the spread is unknown."""

    mean: float
    low: float
    high: float
    runs: int

    @classmethod
    def exact(cls, value: float, runs: int = 1) -> Interval:
        """Return an interval without width."""
        return cls(value, value, value, runs)

    def map(self, function: Callable[[float], float]) -> Interval:
        """Return the interval transformed by a monotonic function."""
        low, high = sorted((function(self.low), function(self.high)))
        return Interval(function(self.mean), low, high, self.runs)


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the interval of the mean of independent values."""
    mean, count = fmean(values), len(values)
    if count == 1:
        return Interval.exact(mean)
    half = quantile(count - 1) * stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def difference_interval(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return Welch's interval of the difference of two means of independent values."""
    mean, runs = fmean(first) - fmean(second), min(len(first), len(second))
    if runs == 1:
        return Interval.exact(mean)
    shares = [variance(values) / len(values) for values in (first, second)]
    total = sum(shares)
    if total == 0:
        return Interval.exact(mean, runs)
    spread = sum(share**2 / (len(values) - 1) for share, values in zip(shares, (first, second), strict=True))
    half = quantile(max(1, int(total**2 / spread))) * math.sqrt(total)
    return Interval(mean, mean - half, mean + half, runs)


def quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
