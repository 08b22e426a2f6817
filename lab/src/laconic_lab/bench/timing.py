"""Timing relative to memcpy: each measurement is between two copies of the same payload.

Speed varies between machines and over time on one machine; the ratio to copies made just before and after is far more
repeatable than seconds. The copy is libc's memcpy between two existing buffers, the least that a program does with an
uncompressed payload.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Stopwatch", "Timing", "per_call", "quartiles"]

Operation = Callable[[], object]

MIN_ROUNDS = 3


def quartiles(values: tuple[float, ...]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of the runs of one operation, and of the copies around each run (mean of two)."""

    seconds: tuple[float, ...]
    copies: tuple[float, ...]

    @property
    def median(self) -> float:
        return quartiles(self.seconds)[1]

    @property
    def speed(self) -> float:
        """Speed relative to memcpy: the median of copy time over operation time."""
        return self.speed_quartiles[1]

    @property
    def speed_quartiles(self) -> tuple[float, float, float]:
        return quartiles(tuple(copy / run for copy, run in zip(self.copies, self.seconds, strict=True)))

    def values(self, name: str) -> dict[str, Any]:
        """Return seconds and multiples of memcpy's speed with quartiles, for a Record."""
        seconds, speed = quartiles(self.seconds), self.speed_quartiles
        return {
            f"{name}_s": seconds[1], f"{name}_quartiles_s": [seconds[0], seconds[2]], f"{name}_x_memcpy": speed[1],
            f"{name}_x_memcpy_quartiles": [speed[0], speed[2]], f"{name}_runs": len(self.seconds),
        }  # fmt: skip


class Stopwatch:
    """Times operations in turns with a memcpy of ``payload`` between any two of them.

    Args:
        payload: A contiguous CPU tensor; a second buffer of its size is kept.
        budget_s: After three rounds, no new round begins once this much time is spent.
    """

    def __init__(self, payload: Tensor, *, budget_s: float = 8.0) -> None:
        assert payload.is_contiguous() and payload.device.type == "cpu"
        self.source, self.target = payload, torch.zeros_like(payload)
        self.nbytes = payload.numel() * payload.element_size()
        self.budget_s = budget_s
        self.copies: list[float] = []
        self._memcpy = ctypes.CDLL(None).memcpy
        self._memcpy.restype = ctypes.c_void_p
        self._memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self.copy()

    def copy(self) -> float:
        """Return the seconds of one copy."""
        begin = time.perf_counter()
        self._memcpy(self.target.data_ptr(), self.source.data_ptr(), self.nbytes)
        return time.perf_counter() - begin

    def measure(self, operations: Mapping[str, Operation], repeat: int, *, share: float = 1.0) -> dict[str, Timing]:
        """Run each operation ``repeat`` times after a warm-up run.

        Args:
            repeat: Rounds; fewer, but at least three, when the budget is spent.
            share: Fraction of the payload that the operations process; copy times are scaled by it.
        """
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in operations}
        for operation in operations.values():
            operation()
        began = time.perf_counter()
        before = self.copy()
        for done in range(repeat):
            if done >= MIN_ROUNDS and time.perf_counter() - began > self.budget_s:
                break
            for name, operation in operations.items():
                begin = time.perf_counter()
                operation()
                seconds = time.perf_counter() - begin
                after = self.copy()
                runs[name].append((seconds, share * (before + after) / 2))
                self.copies.append(after)
                before = after
        return {
            name: Timing(tuple(run for run, _ in pairs), tuple(copy for _, copy in pairs))
            for name, pairs in runs.items()
        }


def per_call(operation: Operation, *, calls: int = 50, batches: int = 5) -> float:
    """Return the seconds of one call of a short operation: the median over batches of calls."""
    for _ in range(3):
        operation()
    seconds = []
    for _ in range(batches):
        begin = time.perf_counter()
        for _ in range(calls):
            operation()
        seconds.append((time.perf_counter() - begin) / calls)
    return statistics.median(seconds)
