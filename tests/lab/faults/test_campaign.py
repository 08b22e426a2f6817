"""Invariants hold under every fault of the campaign, and a violated invariant is reported."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from laconic.errors import ConfigError
from laconic_lab.faults import FAULTS, MODES, campaign
from laconic_lab.faults.campaign import Case, run_case
from laconic_lab.faults.invariants import InvariantError, applied_once
from laconic_lab.faults.members import MEMBERS
from laconic_lab.faults.scenario import Scenario

WITHOUT_ROUNDS = ("worker-dies", "answer-lost", "server-dies", "reset", "flipped-bit", "sent-again", "not-finite")

TESTED_ELSEWHERE = ("unread-answers", "unread-weights", "silent-streams")
"""Faults of which tests/cluster/test_idle_members.py has a quick test."""


def scenarios() -> list[object]:
    """Every fault in sync mode, and seven faults in one mode without rounds; the rest is slow."""
    selected = []
    without = [mode for mode in MODES if mode != "sync"]
    for name in FAULTS:
        for mode in MODES:
            chosen = without[WITHOUT_ROUNDS.index(name) % len(without)] if name in WITHOUT_ROUNDS else None
            soon = FAULTS[name].seconds < 5 and mode in ("sync", chosen) and name not in TESTED_ELSEWHERE
            selected.append(pytest.param(name, mode, marks=() if soon else pytest.mark.slow))
    return selected


@pytest.mark.parametrize("name, mode", scenarios())
def test_invariants_hold_under_fault(name: str, mode: str) -> None:
    assert run_case(Case(name, mode)).broken is None


@pytest.mark.parametrize("name, mode", [(name, mode) for name, one in MEMBERS.items() for mode in one.modes])
def test_member_that_means_harm_is_contained(name: str, mode: str) -> None:
    assert run_case(Case(name, mode, seed=3)).broken is None


def test_forged_ledger_entry_raises_invariant_error(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, "sync")
    scenario.at(1, 3, lambda life: scenario.core.parameters["ledger"].view(-1)[5:6].add_(1))
    with pytest.raises(InvariantError, match=r"places \[5\] of the ledger"):
        scenario.run()


def test_time_of_an_action_does_not_count_as_a_hang(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "fault", "sync", exchanges=4, timeout_s=3.0)
    scenario.at(1, 2, lambda life: time.sleep(3.5))
    scenario.run()
    scenario = Scenario(tmp_path / "job", "sync", exchanges=4, timeout_s=1.0, compute_s=1.5)
    with pytest.raises(InvariantError, match="the job hangs at exchange 0 of 4"):
        scenario.run()


def test_push_applied_twice_raises_invariant_error() -> None:
    push = {"event": "push", "worker": 0, "sequence": 0}
    applied = {"event": "applied", "worker": 0, "sequence": 0, "version": 1}
    assert applied_once([push, applied])
    with pytest.raises(InvariantError, match="more than once"):
        applied_once([push, applied, applied])
    with pytest.raises(InvariantError, match="not applied"):
        applied_once([push, applied, push | {"sequence": 1}])


def test_unknown_fault_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="unknown fault 'meteor'"):
        campaign(["meteor"])
