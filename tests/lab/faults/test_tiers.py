"""Tiers of the campaign: what is missing is run, what is broken is run again."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from laconic.errors import ConfigError, LaconicError
from laconic.records import Record, read, write
from laconic.train.methods import METHODS
from laconic_lab.faults import FAULTS, MODES, tiers
from laconic_lab.faults.campaign import TRAINING, Case, cases, run_case
from laconic_lab.faults.idle_phases import IdleResult
from laconic_lab.faults.members import MEMBERS
from laconic_lab.faults.scenario import LEDGER_METHODS
from laconic_lab.faults.tiers import TIERS, Tier, run_tier, summarise


def test_interrupted_tier_continues_with_the_missing_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    broken_at = {20, 40}

    def run(piece: dict[str, Any]) -> Record:
        ran.append(piece["first"])
        if len(ran) == 4:
            raise KeyboardInterrupt
        broken = ["P1"] if piece["first"] in broken_at else []
        return Record("faults.scenarios", {"first": piece["first"], "count": 20, "broken": broken})

    monkeypatch.setitem(tiers._RUNS, "scenarios", run)  # type: ignore[index]
    path, tier = tmp_path / "tier.jsonl", Tier(scenarios=100, kills=0, soak=0, idle=0, packets=0)
    with pytest.raises(KeyboardInterrupt):
        run_tier(tier, path)
    assert ran == [0, 20, 40, 60] and summarise(read(path))["scenarios"].done == 60
    broken_at.clear()
    found = run_tier(tier, path)["scenarios"]
    assert ran[4:] == [20, 40, 60, 80] and (found.done, found.broken) == (100, ())
    assert [reason.partition(": ")[2] for reason in found.repeated] == ["['P1']", "['P1']"]
    assert found.first is not None and len(read(path)) == 7
    run_tier(tier, path)
    assert len(ran) == 8


def soak_record(at: str, seed: int, exchanges: int, broken: str | None) -> Record:
    return Record("faults.soak", {"exchanges": exchanges, "seconds": 60.0, "broken": broken}, seed=seed, at=at)


@pytest.mark.parametrize(
    "later, resolved",
    [
        (soak_record("2026-01-02T00:00:00+00:00", 0, 900, None), True),
        (soak_record("2026-01-02T00:00:00+00:00", 3, 600, None), True),
        (soak_record("2026-01-02T00:00:00+00:00", 0, 599, None), False),  # shorter
        (soak_record("2025-12-31T00:00:00+00:00", 0, 900, None), False),  # before it
        (soak_record("2026-01-02T00:00:00+00:00", 0, 900, "not flat"), False),
    ],
)
def test_broken_soak_is_resolved_by_a_later_one_of_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: Record, resolved: bool
) -> None:
    ran: list[tuple[int, int]] = []

    def run(piece: dict[str, Any]) -> Record:
        ran.append((piece["seed"], piece["exchanges"]))
        return soak_record("2026-01-03T00:00:00+00:00", piece["seed"], piece["exchanges"], None)

    monkeypatch.setitem(tiers._RUNS, "soak", run)  # type: ignore[index]
    path, tier = tmp_path / "tier.jsonl", Tier(scenarios=0, kills=0, soak=60, idle=0, packets=0)
    write([soak_record("2026-01-01T00:00:00+00:00", 3, 600, "a worker gave up"), later], path)
    found = summarise(read(path))["soak"]
    assert ("a worker gave up" not in found.broken) == resolved
    assert found.repeated == (("2026-01-01: a worker gave up",) if resolved else ())
    found = run_tier(tier, path, ["soak"])["soak"]
    assert ((3, 600) in ran) != resolved and found.broken == () and found.done == 60
    assert "2026-01-01: a worker gave up" in found.repeated


def test_no_piece_starts_after_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def run(piece: dict[str, Any]) -> Record:
        clock[0] += 3.0
        return Record("faults.scenarios", {"first": piece["first"], "count": 20, "broken": []})

    monkeypatch.setitem(tiers._RUNS, "scenarios", run)  # type: ignore[index]
    monkeypatch.setattr(tiers.time, "monotonic", lambda: clock[0])
    tier = Tier(scenarios=100, kills=0, soak=0, idle=0, packets=0)
    assert run_tier(tier, tmp_path / "tier.jsonl", limit_s=4.0)["scenarios"].done == 40
    assert run_tier(tier, tmp_path / "tier.jsonl", limit_s=0.0)["scenarios"].done == 40
    assert run_tier(tier, tmp_path / "tier.jsonl")["scenarios"].done == 100


def test_packets_of_several_targets_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)

    def run(piece: dict[str, Any]) -> Record:
        if piece["seed"] == 0:
            together.wait(10)  # breaks if fewer are run at a time
        if piece == {"seed": 1, "target": "b", "isa": "x"}:
            raise LaconicError("no compiler")
        values = {"target": piece["target"], "isa": piece["isa"], "count": 10, "broken": None}
        return Record("faults.packets", values, seed=piece["seed"])

    pieces = [{"seed": seed, "target": target, "isa": "x"} for seed in range(9) for target in "abc"]
    monkeypatch.setitem(tiers._RUNS, "packets", run)  # type: ignore[index]
    monkeypatch.setitem(tiers._PIECES, "packets", lambda goal: iter(pieces))  # type: ignore[index]
    path, tier = tmp_path / "tier.jsonl", Tier(scenarios=0, kills=0, soak=0, idle=0, packets=100)
    with pytest.raises(LaconicError, match="no compiler"):
        run_tier(tier, path, ["packets"], jobs=3)
    kept = {(record.seed, record.values["target"]) for record in read(path)}
    assert {(0, "a"), (0, "b"), (0, "c")} <= kept and (1, "b") not in kept
    monkeypatch.setitem(tiers._RUNS, "packets", lambda piece: run(piece | {"isa": "y"}))  # type: ignore[index]
    assert run_tier(tier, path, ["packets"], jobs=3)["packets"].done >= 100


def test_a_reader_without_packets_is_given_some_though_the_goal_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def piece_record(piece: dict[str, Any]) -> Record:
        values = {"target": piece["target"], "isa": piece["isa"], "count": 100, "broken": None}
        return Record("faults.packets", values, seed=piece["seed"])

    ran: list[dict[str, Any]] = []
    pieces = [{"seed": seed, "target": target, "isa": "x"} for seed in range(9) for target in "abc"]
    monkeypatch.setitem(tiers._RUNS, "packets", lambda piece: ran.append(piece) or piece_record(piece))  # type: ignore
    monkeypatch.setitem(tiers._PIECES, "packets", lambda goal: iter(pieces))  # type: ignore[index]
    monkeypatch.setattr(tiers, "packet_targets", lambda: ["a", "b", "c"])
    path, tier = tmp_path / "tier.jsonl", Tier(scenarios=0, kills=0, soak=0, idle=0, packets=100)
    write([piece_record({"seed": 3, "target": "a", "isa": "y"})], path)
    assert run_tier(tier, path, ["packets"])["packets"].done == 300
    assert ran == [{"seed": 0, "target": "b", "isa": "x"}, {"seed": 0, "target": "c", "isa": "x"}]
    run_tier(tier, path, ["packets"])
    assert len(ran) == 2


def test_cases_of_tier_3_have_every_fault_mode_and_method() -> None:
    all_cases = cases(TIERS[3].scenarios)
    assert all_cases[:50] == cases(50) and len(set(all_cases)) == len(all_cases) == 1120
    kinds = Counter((case.fault, case.mode, case.method) for case in all_cases)
    assert {(fault, mode, method) for fault in FAULTS for mode in MODES for method in LEDGER_METHODS} <= kinds.keys()
    assert min(kinds[TRAINING, "sync", method] for method in METHODS) >= 20
    assert all(kinds[name, mode, "1"] >= 17 for name, one in MEMBERS.items() for mode in one.modes)


def test_record_of_scenarios_says_what_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "CASES_PER_PIECE", 2)
    monkeypatch.setattr(tiers, "cases", lambda count: [Case("bomb", "sync", "2", 1), Case("worker-dies", "async")])
    run_tier(Tier(scenarios=2, kills=0, soak=0, idle=0, packets=0), tmp_path / "tier.jsonl")
    (record,) = read(tmp_path / "tier.jsonl")
    assert record.values["faults"] == {"bomb": 1, "worker-dies": 1} and record.values["methods"] == {"2": 1, "1": 1}
    assert record.values["count"] == 2 and record.values["broken"] == []


def test_training_that_loses_its_server_and_workers_keeps_the_invariants() -> None:
    assert run_case(Case(TRAINING, "sync", "1", seed=1)).broken is None


def test_unknown_part_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown part 'storm': expected one of scenarios, kills"):
        run_tier(TIERS[1], tmp_path / "tier.jsonl", ["storm"])


@pytest.mark.parametrize("slower", [1.05, 1.25])
def test_idle_calls_that_slow_the_steps_down_are_broken_and_run_again(
    slower: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tier, times = tmp_path / "tier.jsonl", Tier(0, 0, 0, idle=1, packets=0), [slower, 1.0]
    monkeypatch.setattr(tiers, "run_idle", lambda kind: IdleResult(kind, 0.02, 0.02 * times.pop(0), (1.0,), None))
    first = run_tier(tier, path, ["idle"])["idle"]
    again = run_tier(tier, path, ["idle"])["idle"]
    if slower < 1.1:
        assert not first.broken and times == [1.0]  # not run again
    else:
        assert "+25%" in first.broken[0] and "at most 10%" in first.broken[0]
        assert not again.broken and not times and "+25%" in again.repeated[0]
