"""All faults in all modes, again and again, each from a seed that is told."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import ConfigError, LaconicError
from laconic_lab.faults.fault_types import CLASSES
from laconic_lab.faults.scenario import Scene

__all__ = ["MODES", "Outcome", "campaign"]

MODES = ("sync", "async", "bounded:2")


@dataclass(frozen=True)
class Outcome:
    """What became of one scene. ``broken`` is the promise that was, or None."""

    fault: str
    mode: str
    seconds: float
    broken: str | None


def campaign(
    faults: Sequence[str] = tuple(CLASSES),
    modes: Sequence[str] = MODES,
    *,
    repeat: int = 1,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Every fault in every mode; what became of each."""
    unknown = [name for name in faults if name not in CLASSES]
    if unknown:
        raise ConfigError(f"unknown fault {unknown[0]!r}: expected one of {', '.join(CLASSES)}")
    outcomes = []
    for _ in range(repeat):
        for name in faults:
            for mode in modes:
                outcome = one(name, mode)
                outcomes.append(outcome)
                tell(outcome)
    return outcomes


def one(name: str, mode: str) -> Outcome:
    """One scene."""
    began = time.monotonic()
    broken = None
    with tempfile.TemporaryDirectory(prefix="laconic-faults-") as folder:
        scene = Scene(Path(folder), mode, **CLASSES[name].scene)
        CLASSES[name].prepare(scene)
        try:
            scene.run()
        except LaconicError as error:
            broken = str(error)
    return Outcome(name, mode, time.monotonic() - began, broken)
