"""Every fault of the campaign keeps every promise; a promise that is broken is seen."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from laconic.errors import ConfigError
from laconic_lab.faults import CLASSES, MODES, campaign
from laconic_lab.faults.campaign import one
from laconic_lab.faults.invariants import InvariantError, applied_once
from laconic_lab.faults.scenario import Scene

WITHOUT_ROUNDS = ("worker-dies", "answer-lost", "server-dies", "reset", "flipped-bit", "sent-again", "not-finite")


def scenes() -> list[object]:
    """All faults in rounds, and those that differ without in one mode of these; the rest takes its time."""
    found = []
    without = [mode for mode in MODES if mode != "sync"]
    for name in CLASSES:
        for mode in MODES:
            chosen = without[WITHOUT_ROUNDS.index(name) % len(without)] if name in WITHOUT_ROUNDS else None
            soon = CLASSES[name].seconds < 5 and mode in ("sync", chosen)
            found.append(pytest.param(name, mode, marks=() if soon else pytest.mark.slow))
    return found


@pytest.mark.parametrize("name, mode", scenes())
def test_promises_are_kept(name: str, mode: str) -> None:
    assert one(name, mode).broken is None


def test_what_was_forged_shows_in_the_ledger(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "sync")
    scene.at(1, 3, lambda life: scene.core.parameters["ledger"].view(-1)[5:6].add_(1))
    with pytest.raises(InvariantError, match=r"places \[5\] of the ledger"):
        scene.run()


def test_the_time_that_a_fault_takes_is_not_the_jobs(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "fault", "sync", exchanges=4, patience=3.0)
    scene.at(1, 2, lambda life: time.sleep(3.5))
    scene.run()
    scene = Scene(tmp_path / "job", "sync", exchanges=4, patience=1.0, computing=1.5)
    with pytest.raises(InvariantError, match="the job hangs at exchange 0 of 4"):
        scene.run()


def test_a_push_applied_twice_shows_in_the_history() -> None:
    push = {"event": "push", "worker": 0, "sequence": 0}
    applied = {"event": "applied", "worker": 0, "sequence": 0, "version": 1}
    assert applied_once([push, applied])
    with pytest.raises(InvariantError, match="more than once"):
        applied_once([push, applied, applied])
    with pytest.raises(InvariantError, match="not applied"):
        applied_once([push, applied, push | {"sequence": 1}])


def test_an_unknown_fault_is_told() -> None:
    with pytest.raises(ConfigError, match="unknown fault 'meteor'"):
        campaign(["meteor"])
