"""A soak test: a long job with a fault at regular intervals, to find leaks."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from laconic_lab.faults.fault_types import FAULTS, STEP
from laconic_lab.faults.scenario import Action, Scenario

__all__ = ["Soak", "soak", "usage"]

ROUND_S = 0.1
"""Seconds of a round."""
SOAK_FAULTS = (
    "worker-dies", "answer-lost", "server-dies", "straggler", "stalled-cable", "reset", "flipped-bit", "wrong-shape",
    "corrupt", "cut-off", "not-finite", "bomb", "other-version", "older-life", "garbage",
)  # fmt: skip
ALLOWED_GROWTH = 1.10
"""Ratio of memory in the last quarter to memory in the second quarter that is still called flat."""


@dataclass(frozen=True)
class Soak:
    """The outcome of a soak test.

    Args:
        rss: Median bytes of memory in the second and in the last quarter of the time.
        descriptors: Median open files in the second and in the last quarter.
        broken: The violated invariant, or None.
    """

    seconds: float
    faults: int
    exchanges: int
    rss: tuple[int, int]
    descriptors: tuple[int, int]
    broken: str | None


def soak(
    seconds: float, *, every: float = 20.0, workers: int = 4, mode: str = "sync", seed: int = 0,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Soak:  # fmt: skip
    """Run a job for about that many seconds, with a random fault at regular intervals.

    Args:
        every: Seconds between two faults.
        seed: Chooses faults and workers.
        tell: Called about every second with the exchanges done and their total.
    """
    rng = random.Random(seed)
    exchanges = max(20, round(seconds / ROUND_S))
    between = max(5, round(every / ROUND_S))
    steps = range(STEP, exchanges - 5, between)
    samples: list[tuple[int, int]] = []
    ended = threading.Event()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="laconic-soak-") as folder:
        scenario = Scenario(
            Path(folder), mode, workers=workers, exchanges=exchanges, link=True, compute_s=ROUND_S,
            timeout_s=5 * seconds + 60,
        )  # fmt: skip
        for step in steps:
            worker, action = _pick(rng, workers)
            scenario.at(worker, step, action)

        def watch() -> None:
            while not ended.wait(1.0):
                samples.append(usage())
                tell(scenario.core.version, exchanges * scenario.job.updates_per_exchange)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            broken = scenario.violation()
        finally:
            ended.set()
            watcher.join()
    memory, files = ([sample[i] for sample in samples] for i in (0, 1))
    rss, descriptors = _quarters(memory), _quarters(files)
    if broken is None and (rss[1] > ALLOWED_GROWTH * rss[0] or descriptors[1] > descriptors[0] + 8):
        broken = f"not flat: memory {rss[0]} to {rss[1]} bytes, open files {descriptors[0]} to {descriptors[1]}"
    return Soak(time.monotonic() - began, len(steps), exchanges, rss, descriptors, broken)


def _pick(rng: random.Random, workers: int) -> tuple[int, Action]:
    """Return a random fault's worker and action; faults of the link hit worker 1, which is behind it."""
    name = rng.choice(SOAK_FAULTS)
    action = FAULTS[name].action
    assert action is not None
    return (1 if FAULTS[name].scenario else rng.randrange(workers)), action


def usage() -> tuple[int, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path("/proc/self/fd").iterdir()))


def _quarters(samples: list[int]) -> tuple[int, int]:
    quarter = len(samples) // 4
    if not quarter:
        return (0, 0)
    return int(median(samples[quarter : 2 * quarter])), int(median(samples[-quarter:]))
