"""Step times of a job while a member leaves calls open; calm and disturbed phases alternate within one job."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

from laconic.errors import ConfigError
from laconic_lab.faults.connection_flood import COMPUTING, WARM_UP, step_times
from laconic_lab.faults.idle_calls import IDLE_KINDS, IdleCalls
from laconic_lab.faults.scenario import Scenario, WorkerLife

__all__ = ["IdleResult", "run_idle"]


@dataclass(frozen=True)
class IdleResult:
    """The outcome.

    Args:
        calm: Median seconds of a step in calm phases.
        disturbed: Median seconds of a step in disturbed phases.
        ratios: Median of each disturbed phase over that of the calm phase before it, ascending.
        broken: The violated invariant, or None.
    """

    kind: str
    calm: float
    disturbed: float
    ratios: tuple[float, ...]
    broken: str | None

    @property
    def slower(self) -> float:
        return self.disturbed / self.calm


def run_idle(kind: str, *, phases: int = 8, steps: int = 40) -> IdleResult:
    """Run a synchronous job of two workers, alternately undisturbed and with calls that worker 0 leaves open.

    Args:
        kind: One of ``IDLE_KINDS``.
        steps: Exchanges of each phase.
    """
    if kind not in IDLE_KINDS:
        raise ConfigError(f"kind must be one of {', '.join(IDLE_KINDS)}, got {kind!r}")
    idle = IdleCalls()
    with tempfile.TemporaryDirectory(prefix="laconic-idle-") as folder:
        scenario = Scenario(
            Path(folder), "sync", exchanges=WARM_UP + 2 * phases * steps + 1, compute_s=COMPUTING,
            timeout_s=40 * phases * steps * COMPUTING + 120,
        )  # fmt: skip

        def start(life: WorkerLife) -> None:
            IDLE_KINDS[kind](life, idle)

        def stop(life: WorkerLife) -> None:
            idle.release()

        for phase in range(phases):
            scenario.at(0, WARM_UP + (2 * phase + 1) * steps, start)
            scenario.at(0, WARM_UP + (2 * phase + 2) * steps, stop)
        scenario.at_end(idle.release)
        broken = scenario.violation()
        calm, disturbed = step_times(scenario, phases, steps) if broken is None else ([[1.0]], [[1.0]])
    ratios = (median(after) / median(before) for before, after in zip(calm, disturbed, strict=True))
    return IdleResult(
        kind, median(chain.from_iterable(calm)), median(chain.from_iterable(disturbed)), tuple(sorted(ratios)), broken
    )
