"""A long run with a fault every so often: what leaks or wears out shows only after a while."""

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

from laconic.errors import LaconicError
from laconic_lab.faults.fault_types import CLASSES, STEP
from laconic_lab.faults.scenario import Action, Scene

__all__ = ["Soak", "soak", "usage"]

PACE = 0.1
"""Seconds that a round takes."""
FAULTS = (
    "worker-dies", "answer-lost", "server-dies", "straggler", "stalled-cable", "reset", "flipped-bit", "wrong-shape",
    "corrupt", "cut-off", "not-finite", "bomb", "other-version", "older-life", "garbage",
)  # fmt: skip
FLAT = 1.10
"""How much more memory the last quarter may take than the second."""


@dataclass(frozen=True)
class Soak:
    """What became of it.

    Args:
        seconds: How long it took.
        faults: How many there were.
        exchanges: Of each worker.
        rss: Bytes of memory, in the second quarter of the time and in the last; medians.
        descriptors: Open files, the same.
        broken: The promise that was broken, or None.
    """

    seconds: float
    faults: int
    exchanges: int
    rss: tuple[int, int]
    descriptors: tuple[int, int]
    broken: str | None


def soak(
    seconds: float,
    *,
    every: float = 20.0,
    workers: int = 4,
    mode: str = "sync",
    seed: int = 0,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Soak:
    """A job of about that many seconds, a fault of any kind every so many, chosen by the seed.

    Args:
        seconds: How long.
        every: Seconds between two faults.
        workers: How many.
        mode: Of the job.
        seed: Chooses faults and workers.
        tell: Told the exchanges done and in all, about every second.
    """
    rng = random.Random(seed)
    exchanges = max(20, round(seconds / PACE))
    between = max(5, round(every / PACE))
    steps = range(STEP, exchanges - 5, between)
    samples: list[tuple[int, int]] = []
    ended = threading.Event()
    began = time.monotonic()
    broken = None
    with tempfile.TemporaryDirectory(prefix="laconic-soak-") as folder:
        scene = Scene(
            Path(folder),
            mode,
            workers=workers,
            exchanges=exchanges,
            cable=True,
            computing=PACE,
            patience=5 * seconds + 60,
        )
        for step in steps:
            worker, action = _pick(rng, workers)
            scene.at(worker, step, action)

        def watch() -> None:
            while not ended.wait(1.0):
                samples.append(usage())
                tell(scene.core.version, exchanges if mode == "sync" else exchanges * workers)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            scene.run()
        except LaconicError as error:
            broken = str(error)
        finally:
            ended.set()
            watcher.join()
    memory, files = ([sample[i] for sample in samples] for i in (0, 1))
    rss, descriptors = _quarters(memory), _quarters(files)
    if broken is None and (rss[1] > FLAT * rss[0] or descriptors[1] > descriptors[0] + 8):
        broken = f"not flat: memory {rss[0]} to {rss[1]} bytes, open files {descriptors[0]} to {descriptors[1]}"
    return Soak(time.monotonic() - began, len(steps), exchanges, rss, descriptors, broken)


def _pick(rng: random.Random, workers: int) -> tuple[int, Action]:
    """A fault, and whom it strikes. What is done to the cable is done to worker 1, who is on it."""
    name = rng.choice(FAULTS)
    action = CLASSES[name].action
    assert action is not None
    return (1 if CLASSES[name].scene else rng.randrange(workers)), action


def usage() -> tuple[int, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path("/proc/self/fd").iterdir()))


def _quarters(samples: list[int]) -> tuple[int, int]:
    quarter = len(samples) // 4
    if not quarter:
        return (0, 0)
    return int(median(samples[quarter : 2 * quarter])), int(median(samples[-quarter:]))
