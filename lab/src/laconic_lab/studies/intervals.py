"""A mean and how far off it may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

__all__ = ["Interval", "mean_interval"]

STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantiles of Student's t for 1 to 15 degrees of freedom; beyond, an expansion is good to three digits."""


class Interval(NamedTuple):
    """95 % confidence; low and high are the mean where one value says nothing about the spread."""

    mean: float
    low: float
    high: float
    runs: int

    def map(self, function: Callable[[float], float]) -> Interval:
        """Through a monotonic function."""
        low, high = sorted((function(self.low), function(self.high)))
        return Interval(function(self.mean), low, high, self.runs)


def mean_interval(values: Sequence[float]) -> Interval:
    """Of the mean of independent values."""
    mean, count = fmean(values), len(values)
    if count == 1:
        return Interval(mean, mean, mean, 1)
    half = quantile(count - 1) * stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def quantile(freedom: int) -> float:
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
