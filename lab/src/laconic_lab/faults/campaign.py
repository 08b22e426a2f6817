"""The fault campaign: every fault in every mode."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import ConfigError
from laconic_lab.faults.fault_types import FAULTS
from laconic_lab.faults.scenario import Scenario

__all__ = ["MODES", "Outcome", "campaign"]

MODES = ("sync", "async", "bounded:2")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one scenario; ``broken`` is the violated invariant, or None."""

    fault: str
    mode: str
    seconds: float
    broken: str | None


def campaign(
    faults: Sequence[str] = tuple(FAULTS), modes: Sequence[str] = MODES, *, repeat: int = 1,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:  # fmt: skip
    """Run every fault in every mode and return the outcomes."""
    unknown = [name for name in faults if name not in FAULTS]
    if unknown:
        raise ConfigError(f"unknown fault {unknown[0]!r}: expected one of {', '.join(FAULTS)}")
    outcomes = []
    for _ in range(repeat):
        for name in faults:
            for mode in modes:
                outcome = run_fault(name, mode)
                outcomes.append(outcome)
                tell(outcome)
    return outcomes


def run_fault(name: str, mode: str) -> Outcome:
    """Run one fault in one mode."""
    began = time.monotonic()
    broken = None
    with tempfile.TemporaryDirectory(prefix="laconic-faults-") as folder:
        scenario = Scenario(Path(folder), mode, **FAULTS[name].scenario)
        FAULTS[name].prepare(scenario)
        broken = scenario.violation()
    return Outcome(name, mode, time.monotonic() - began, broken)
