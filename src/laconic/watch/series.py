"""A series of points that stays short however many are added."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["ThinnedSeries"]

T = TypeVar("T")


class ThinnedSeries(Generic[T]):
    """Keeps at most ``limit`` evenly spaced points: when there are more, every other one is dropped.

    >>> series = ThinnedSeries[int](limit=4)
    >>> for value in range(10):
    ...     series.add(value)
    >>> series.points
    [0, 4, 8]
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.points: list[T] = []
        self._stride, self._count = 1, 0

    def add(self, point: T) -> None:
        if self._count % self._stride == 0:
            self.points.append(point)
            if len(self.points) > self._limit:
                self.points, self._stride = self.points[::2], 2 * self._stride
        self._count += 1
