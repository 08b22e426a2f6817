"""Timing against a yardstick: every measurement stands between two copies of the same payload.

Machines differ and so do moments on one machine; the ratio to a copy made just before and after repeats far better than
seconds do. The copy is libc's memcpy between two buffers that were there before: what a program could at best do with
the payload if it did not compress it.
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
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third


@dataclass(frozen=True)
class Timing:
    """Runs of one operation, each with the mean of the copies before and after it, in seconds of wall clock."""

    seconds: tuple[float, ...]
    copies: tuple[float, ...]

    @property
    def median(self) -> float:
        return quartiles(self.seconds)[1]

    @property
    def speed(self) -> float:
        """Times as fast as memcpy: the median over the runs of copy / operation."""
        return self.speed_quartiles[1]

    @property
    def speed_quartiles(self) -> tuple[float, float, float]:
        return quartiles(tuple(copy / run for copy, run in zip(self.copies, self.seconds, strict=True)))

    def values(self, name: str) -> dict[str, Any]:
        """For a Record: seconds and multiples of memcpy's speed, each with quartiles."""
        seconds, speed = quartiles(self.seconds), self.speed_quartiles
        return {
            f"{name}_s": seconds[1],
            f"{name}_quartiles_s": [seconds[0], seconds[2]],
            f"{name}_x_memcpy": speed[1],
            f"{name}_x_memcpy_quartiles": [speed[0], speed[2]],
            f"{name}_runs": len(self.seconds),
        }


class Stopwatch:
    """Times operations in turns, a memcpy of ``payload`` between any two of them.

    Args:
        payload: A contiguous CPU tensor. A buffer of its size is kept for the copies.
        budget_s: No new round of turns is begun once this long was spent, after three.
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
        """Seconds of one copy."""
        begin = time.perf_counter()
        self._memcpy(self.target.data_ptr(), self.source.data_ptr(), self.nbytes)
        return time.perf_counter() - begin

    def measure(self, operations: Mapping[str, Operation], repeat: int, *, share: float = 1.0) -> dict[str, Timing]:
        """Each operation ``repeat`` times, after one run that does not count.

        Args:
            operations: What to time, by name.
            repeat: Rounds; fewer (three at least) when the budget is spent.
            share: The part of the payload that the operations work on; the copies are scaled down to it.
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
            name: Timing(tuple(run for run, _ in found), tuple(copy for _, copy in found))
            for name, found in runs.items()
        }


def per_call(operation: Operation, *, calls: int = 50, batches: int = 5) -> float:
    """Seconds of one call of something short: the median over batches of calls."""
    for _ in range(3):
        operation()
    found = []
    for _ in range(batches):
        begin = time.perf_counter()
        for _ in range(calls):
            operation()
        found.append((time.perf_counter() - begin) / calls)
    return statistics.median(found)
