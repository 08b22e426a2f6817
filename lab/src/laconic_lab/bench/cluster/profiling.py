"""Profiles a server: clocks around the steps of its handlers, in rounds that are not otherwise timed.

A processor clock sees its own thread only, so each step runs in one thread while it is profiled.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

__all__ = ["OF_FRAMES", "STEPS", "Marks"]

STEPS: dict[str, tuple[tuple[str, str], ...]] = {
    "assemble": (("laconic.cluster.server", "Assembler.feed"),),
    "checksum": (
        ("laconic.wire", "unpack"),
        ("laconic.cluster.homomorphic.server", "ContributionTemplate.read"),
        ("laconic.cluster.homomorphic.server", "_parse"),
    ),
    "accumulate": (
        ("laconic.aggregate.decode_sum", "OpenedFrame.add_to"),
        ("laconic.aggregate.decode_sum", "OpenedFrame.decode"),
        ("laconic.cluster.homomorphic.server", "RoundSums.add_slot"),
    ),
    "optimizer step": (("laconic.cluster.weights", "Weights.step"), ("laconic.optim", "SGD.step_frames")),
    "encode": (
        ("laconic.cluster.weights", "Weights.encode_slot"),
        ("laconic.cluster.weights", "Weights.encode_parts"),
        ("laconic.cluster.weights", "Weights.encode_difference"),
    ),
    "cut into messages": (("laconic.cluster.protocol", "frame_messages"),),
}
"""The functions of each step of a push and its reply. A function that no longer exists is reported as missing."""

OF_FRAMES = ("checksum", "accumulate", "optimizer step", "encode")
"""Steps that compute the reply. The other steps, and gRPC itself, move bytes."""


@dataclass
class _Sum:
    wall: float = 0.0
    cpu: float = 0.0
    calls: int = 0


@dataclass
class Marks:
    """Seconds of each step over all threads; time in a nested step counts for the inner step only."""

    sums: dict[str, _Sum] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _local: threading.local = field(default_factory=threading.local, repr=False)

    def install(self) -> None:
        self._threads = torch.get_num_threads()
        for step, functions in STEPS.items():
            for module, name in functions:
                self._wrap(step, module, name)

    def remove(self) -> dict[str, dict[str, float]]:
        """Remove the clocks and return the measurements."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        torch.set_num_threads(self._threads)  # only threads that start from now on are profiled
        return {step: {"wall_s": one.wall, "cpu_s": one.cpu, "calls": one.calls} for step, one in self.sums.items()}

    def _wrap(self, step: str, module: str, name: str) -> None:
        holder: Any = importlib.import_module(module)
        *owners, last = name.split(".")
        for owner in owners:
            holder = getattr(holder, owner, None)
        function = getattr(holder, last, None)
        if function is None:
            self.missing.append(f"{module}.{name}")
            return
        self.sums.setdefault(step, _Sum())
        generator = name == "frame_messages"
        wrapped = self._iterated(step, function) if generator else self._called(step, function)
        setattr(holder, last, wrapped)
        self._undo.append(lambda: setattr(holder, last, function))

    def _called(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with _Clock(self, step):
                return function(*args, **options)

        return call

    def _iterated(self, step: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Iterator[Any]:
            items = function(*args, **options)
            while True:
                with _Clock(self, step):
                    item = next(items, None)
                if item is None:
                    return
                yield item

        return call

    def add(self, step: str, wall: float, cpu: float) -> None:
        with self._lock:
            one = self.sums[step]
            one.wall, one.cpu, one.calls = one.wall + wall, one.cpu + cpu, one.calls + 1

    def inner(self) -> list[list[float]]:
        """Time spent in nested steps, for each open step of this thread."""
        if not hasattr(self._local, "inner"):
            self._local.inner = []
            torch.set_num_threads(1)
        times: list[list[float]] = self._local.inner
        return times


class _Clock:
    def __init__(self, marks: Marks, step: str) -> None:
        self._marks, self._step = marks, step

    def __enter__(self) -> None:
        self._marks.inner().append([0.0, 0.0])
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        wall, cpu = time.perf_counter() - self._wall, time.thread_time() - self._cpu
        stack = self._marks.inner()
        inside = stack.pop()
        if stack:
            stack[-1][0] += wall
            stack[-1][1] += cpu
        self._marks.add(self._step, wall - inside[0], cpu - inside[1])
