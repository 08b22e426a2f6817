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
from typing import NamedTuple

from laconic_lab.faults.fault_types import FAULTS, STEP
from laconic_lab.faults.idle_calls import IDLE_KINDS, IdleCalls
from laconic_lab.faults.scenario import Action, Scenario, WorkerLife

__all__ = ["Soak", "Usage", "soak", "usage"]

ROUND_S = 0.1
"""Seconds of a round."""
SOAK_FAULTS = (
    "worker-dies", "answer-lost", "server-dies", "straggler", "stalled-cable", "reset", "flipped-bit", "wrong-shape",
    "corrupt", "cut-off", "not-finite", "bomb", "other-version", "older-life", "future-life", "garbage",
)  # fmt: skip
IDLE_SECONDS = 3.0
"""Seconds for which a member leaves its calls open."""
PATIENCE_S = 120.0
"""Seconds for which a worker tries to reach the server: on a busy machine the whole process may wait for a while."""
ALLOWED_GROWTH = 1.10
"""Ratio of memory in the last quarter to memory in the second quarter that is still called flat."""
ALLOWED_MORE = 8
"""Open files, and threads, that the last quarter may have more than the second."""


class Usage(NamedTuple):
    """What a process holds: bytes of memory, open files and threads."""

    rss: int
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Soak:
    """The outcome of a soak test.

    Args:
        done: Exchanges made, of all ``exchanges``.
        rss: Median bytes of memory in the second and in the last quarter of the time.
        descriptors: Median open files in the second and in the last quarter.
        threads: Median threads in the second and in the last quarter.
        broken: The violated invariant, or None.
    """

    seconds: float
    faults: int
    exchanges: int
    done: int
    rss: tuple[int, int]
    descriptors: tuple[int, int]
    threads: tuple[int, int]
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
    samples: list[Usage] = []
    ended = threading.Event()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="laconic-soak-") as folder:
        scenario = Scenario(
            Path(folder), mode, workers=workers, exchanges=exchanges, link=True, compute_s=ROUND_S,
            timeout_s=5 * seconds + 60, patience_s=PATIENCE_S,
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
    rss, descriptors, threads = (_quarters(list(held)) for held in zip(*samples, strict=True))
    more = max(descriptors[1] - descriptors[0], threads[1] - threads[0])
    if broken is None and (rss[1] > ALLOWED_GROWTH * rss[0] or more > ALLOWED_MORE):
        broken = (
            f"not flat: memory {rss[0]} to {rss[1]} bytes, open files {descriptors[0]} to {descriptors[1]}, threads "
            f"{threads[0]} to {threads[1]}"
        )
    done = scenario.core.version // scenario.job.updates_per_exchange
    return Soak(time.monotonic() - began, len(steps), exchanges, done, rss, descriptors, threads, broken)


def _pick(rng: random.Random, workers: int) -> tuple[int, Action]:
    """Return a random fault's worker and action; faults of the link hit worker 1, which is behind it."""
    name = rng.choice((*SOAK_FAULTS, *IDLE_KINDS))
    if name in IDLE_KINDS:
        return rng.randrange(workers), _idle_for_a_while(name)
    action = FAULTS[name].action
    assert action is not None
    return (1 if FAULTS[name].scenario else rng.randrange(workers)), action


def _idle_for_a_while(kind: str) -> Action:
    def action(life: WorkerLife) -> None:
        idle = IdleCalls()
        life.scenario.at_end(idle.release)
        IDLE_KINDS[kind](life, idle)
        threading.Timer(IDLE_SECONDS, idle.release).start()

    return action


def usage() -> Usage:
    process = Path("/proc/self")
    pages = int((process / "statm").read_text().split()[1])
    return Usage(
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(list((process / "fd").iterdir())),
        len(list((process / "task").iterdir())),
    )


def _quarters(samples: list[int]) -> tuple[int, int]:
    quarter = len(samples) // 4
    if not quarter:
        return (0, 0)
    return int(median(samples[quarter : 2 * quarter])), int(median(samples[-quarter:]))
