"""The fault campaign: every fault in every mode and with every method, and members that mean harm."""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import ConfigError, LaconicError
from laconic.train.methods import METHODS
from laconic_lab.faults.fault_types import FAULTS
from laconic_lab.faults.members import MEMBERS, check_member
from laconic_lab.faults.recovery import check_losses
from laconic_lab.faults.scenario import LEDGER_METHODS, Scenario

__all__ = ["DESCRIPTIONS", "MODES", "TRAINING", "Case", "Outcome", "campaign", "cases", "run_case"]

MODES = ("sync", "async", "bounded:2")
TRAINING = "training"
"""The fault of cases that train a model: workers and the server are lost, see ``recovery``."""

DESCRIPTIONS: Mapping[str, str] = {name: one.what for name, one in FAULTS.items()} | {
    name: one.what for name, one in MEMBERS.items()
}
"""All faults by name, in words."""
FIRST_MEMBER_CASE = 1000
"""The number from which cases are members that mean harm."""


@dataclass(frozen=True)
class Case:
    """One scenario: a fault, or a training with losses, in a mode and with a method; the seed chooses when."""

    fault: str
    mode: str
    method: str = "1"
    seed: int | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of one scenario; ``broken`` is the violated invariant, or None."""

    fault: str
    mode: str
    seconds: float
    broken: str | None
    method: str = "1"
    seed: int | None = None


def cases(count: int) -> list[Case]:
    """Return that many cases, always the same: each fault in each mode with each method, and trainings with losses.

    Their order is shuffled, so that the first cases are of all kinds; each has a seed of its own. Those from
    ``FIRST_MEMBER_CASE`` on are members that mean harm, in each mode.
    """
    rng = random.Random(0)
    kinds = [(fault, mode, method) for fault in FAULTS for mode in MODES for method in LEDGER_METHODS]
    trainings = [(TRAINING, "sync", method) for method in METHODS] * (len(kinds) // (3 * len(METHODS)) + 1)
    chosen: list[Case] = []
    while len(chosen) < min(count, FIRST_MEMBER_CASE):
        some = kinds + trainings
        rng.shuffle(some)
        chosen += [Case(*kind, seed=len(chosen) + i) for i, kind in enumerate(some)]
    chosen = chosen[:FIRST_MEMBER_CASE]
    members = itertools.cycle((name, mode) for name, one in MEMBERS.items() for mode in one.modes)
    chosen += [Case(*next(members), seed=number) for number in range(len(chosen), count)]
    return chosen[:count]


def campaign(
    faults: Sequence[str] = tuple(DESCRIPTIONS), modes: Sequence[str] = MODES, *, repeat: int = 1,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:  # fmt: skip
    """Run every fault in every mode, and members in the modes in which they can do harm; return the outcomes."""
    unknown = [name for name in faults if name not in DESCRIPTIONS]
    if unknown:
        raise ConfigError(f"unknown fault {unknown[0]!r}: expected one of {', '.join(DESCRIPTIONS)}")
    outcomes = []
    for _ in range(repeat):
        for name in faults:
            for mode in modes:
                if name in MEMBERS and mode not in MEMBERS[name].modes:
                    continue
                outcome = run_case(Case(name, mode))
                outcomes.append(outcome)
                tell(outcome)
    return outcomes


def run_case(case: Case) -> Outcome:
    """Run one scenario."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="laconic-faults-") as folder:
        broken = _violation(case, Path(folder))
    return Outcome(case.fault, case.mode, time.monotonic() - began, broken, case.method, case.seed)


def _violation(case: Case, folder: Path) -> str | None:
    if case.fault == TRAINING or case.fault in MEMBERS:
        try:
            if case.fault == TRAINING:
                check_losses(case.method, folder, case.seed or 0)
            else:
                check_member(case.fault, case.mode, folder, case.seed or 0)
        except LaconicError as error:
            return str(error)
        return None
    scenario = Scenario(folder, case.mode, method=case.method, **FAULTS[case.fault].scenario)
    FAULTS[case.fault].prepare(scenario, None if case.seed is None else random.Random(case.seed))
    return scenario.violation()
