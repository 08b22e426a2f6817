"""Connection flood: a job runs while thousands of foreign connections arrive; its steps must not slow down.

Calm and flooded phases alternate within one job, so that other load on the machine affects both.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

from laconic_lab.faults.flood_process import FloodProcess
from laconic_lab.faults.scenario import Scenario, WorkerLife
from laconic_lab.faults.soak import Usage, usage

__all__ = ["FloodResult", "run_flood", "step_times"]

COMPUTING = 0.02
"""Seconds that a worker computes between two pushes."""
WARM_UP = 20
EDGE = 3
"""Exchanges at both ends of a phase that are not counted, because clients start and stop there."""
RELEASE_S = 30.0
"""Seconds within which the server must release the descriptors of closed connections."""
ALLOWED_GROWTH = 32 << 20
"""Bytes by which memory may grow, because the allocator keeps some."""
WORKER_FAULT_EVENTS = {"lost", "duplicate", "late", "rewound", "spoilt"}
"""Events that mean a worker was disturbed."""


@dataclass(frozen=True)
class FloodResult:
    """The outcome of a connection flood.

    Args:
        connections: Accepted connections that sent garbage.
        dropped: How often the server closed one of the held connections.
        calm: Median seconds of a step in calm phases.
        flooded: Median seconds of a step in flooded phases.
        ratios: Median of each flooded phase over that of the calm phase before it, ascending.
        rss: Bytes of memory before the first flooded phase and after the last.
        descriptors: Open files before the first flooded phase, the maximum at the end of one, and after the last.
        broken: The violated invariant, or None.
    """

    connections: int
    dropped: int
    calm: float
    flooded: float
    ratios: tuple[float, ...]
    rss: tuple[int, int]
    descriptors: tuple[int, int, int]
    broken: str | None

    @property
    def slower(self) -> float:
        """Ratio of the step times in flooded and calm phases."""
        return self.flooded / self.calm


def run_flood(
    garbage: int, held: int, *, phases: int = 8, rate: float = 200.0, tls: bool = False, seed: int = 0
) -> FloodResult:
    """Run a synchronous job of two workers, alternately undisturbed and flooded with foreign connections.

    Args:
        garbage: Total number of connections that send garbage.
        held: Connections held open in each flooded phase.
        rate: Garbage connections per second.
        seed: Chooses the bytes that foreign connections send.
    """
    steps = max(2 * EDGE + 10, round(garbage / phases / rate / COMPUTING))  # the flood ends before its phase does
    with tempfile.TemporaryDirectory(prefix="laconic-flood-") as folder:
        scenario = Scenario(
            Path(folder), "sync", exchanges=WARM_UP + 2 * phases * steps + 1, tls=tls, compute_s=COMPUTING,
            timeout_s=40 * phases * steps * COMPUTING + 120,
        )  # fmt: skip
        control = _FloodControl(scenario, -(-garbage // phases), held, rate, seed)
        for phase in range(phases):
            scenario.at(0, WARM_UP + (2 * phase + 1) * steps, control.start)
            scenario.at(0, WARM_UP + (2 * phase + 2) * steps, control.stop)
        scenario.at(0, WARM_UP + 2 * phases * steps, control.wait_for_release)
        try:
            broken = scenario.violation()
        finally:
            control.close()
        if broken is None and (seen := {event["event"] for event in scenario.events} & WORKER_FAULT_EVENTS):
            broken = f"P5: foreign connections caused the events {', '.join(sorted(seen))}"
        if broken is None and (
            control.after[1] > control.before[1] or control.after[0] > control.before[0] + ALLOWED_GROWTH
        ):
            broken = f"memory and open files grew from {control.before} to {control.after}"
        calm, flooded = step_times(scenario, phases, steps) if broken is None else ([[1.0]], [[1.0]])
    return FloodResult(
        connections=sum(report.get("connected", 0) for report in control.reports),
        dropped=max((report.get("dropped", 0) for report in control.reports), default=0),
        calm=median(chain.from_iterable(calm)),
        flooded=median(chain.from_iterable(flooded)),
        ratios=tuple(sorted(median(after) / median(before) for before, after in zip(calm, flooded, strict=True))),
        rss=(control.before[0], control.after[0]),
        descriptors=(control.before[1], control.most, control.after[1]),
        broken=broken,
    )


class _FloodControl:
    """Starts and stops the flood at steps of worker 0, and measures the server's resources."""

    def __init__(self, scenario: Scenario, garbage: int, held: int, rate: float, seed: int) -> None:
        self._scene, self._garbage, self._held, self._rate, self._seed = scenario, garbage, held, rate, seed
        self._process: FloodProcess | None = None
        self.reports: list[dict[str, int]] = []
        self.before = self.after = Usage(0, 0, 0)
        self.most = 0

    def start(self, life: WorkerLife) -> None:
        if self._process is None:
            self._process = FloodProcess(f"127.0.0.1:{self._scene.server.port}")
            self.before = usage()
        self._order(hold=self._held, seed=self._seed)
        self._process.request(garbage=self._garbage, rate=self._rate, seed=self._seed + 1)
        self._seed += 2

    def stop(self, life: WorkerLife) -> None:
        assert self._process is not None
        self.reports.append(self._process.report())  # after all garbage connections have arrived
        self.most = max(self.most, usage()[1])
        self._order(release=True)

    def wait_for_release(self, life: WorkerLife) -> None:
        """Wait until the server has released the descriptors of the closed connections."""
        end = time.monotonic() + RELEASE_S
        while (now := usage())[1] > self.before[1] and time.monotonic() < end:
            time.sleep(0.02)
        self.after = now

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _order(self, **order: float) -> None:
        assert self._process is not None
        self._process.request(**order)
        self.reports.append(self._process.report())


def step_times(scenario: Scenario, phases: int, steps: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return the step times of calm and of flooded phases, from the event log."""
    at = {event["sequence"]: event["at"] for event in scenario.events if event["event"] == "applied"}
    times: tuple[list[list[float]], list[list[float]]] = [], []
    for phase in range(2 * phases):
        first = WARM_UP + phase * steps
        counted = range(first + EDGE, first + steps - EDGE)
        times[phase % 2].append([at[sequence + 1] - at[sequence] for sequence in counted])
    return times
