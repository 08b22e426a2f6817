"""Claims, tables and plots of oland2015 follow from its Records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laconic.records import Record
from laconic_lab.studies.oland2015 import STUDY
from laconic_lab.studies.oland2015.claims import C5, C6
from laconic_lab.studies.oland2015.experiments import TRAINED
from laconic_lab.studies.oland2015.results import KIND, Results
from laconic_lab.studies.oland2015.settings import Setting
from laconic_lab.studies.oland2015.tables import closest

COMMITTED = Path(__file__).resolve().parents[3] / "results" / "oland2015"


def record(codec: str, part: str = "headline", first: int = 0, **values: Any) -> Record:
    fields = {
        "part": part, "codec": codec, "first_run": first, "runs": 2, "data": "digits", "workers": 5, "epochs": 4,
        "seed": 0, "device": "cpu", "lr": 0.8, "l1": 1e-5, "decay": 0.99, "batch": 100, "pixels": "unit",
        "sends": "weights", "raw_bits": [7.0, 7.2], "whole_bits": [7.0, 8.0], "coded_bits": [4.0, 4.0],
        "peak": [97.0, 98.0], "final": [96.0, 97.0], "peak_epoch": [50, 100], "near_peak_epoch": [40, 80],
        "raw_bits_by_epoch": [8.0, 7.0, 7.0, 6.4], "coded_bits_by_epoch": [5.0, 4.0, 4.0, 3.0],
        "accuracy_by_epoch": [90.0, 95.0, 96.0, 96.5], "packets_compared": 0, "packets_other_values": 0,
        "packets_other_sizes": 0, "coded_bits_by_layer": [4.0, 4.0, 4.0],
    }  # fmt: skip
    return Record("study.oland2015", fields | values)


def test_claims_compare_runs_of_the_same_number() -> None:
    results = Results([
        record("none"), record("none", first=2, peak=[90.0, 91.0]),
        record(C5), record(C6, peak=[97.1, 98.3], peak_epoch=[40, 80], coded_bits=[4.0, 5.0]),
    ])  # fmt: skip
    intervals = {one.claim.key: one.evidence.interval for one in STUDY.findings(results)}
    assert intervals["c5_raw_bits"].mean == pytest.approx(7.1)
    assert intervals["c5_coded_times"].mean == pytest.approx(8.0)
    assert intervals["c6_peak"].mean == pytest.approx(0.2) and intervals["c6_peak"].runs == 2
    assert intervals["c6_epochs"].mean == pytest.approx(20.0)
    assert intervals["c6_overall"].mean == pytest.approx((8 / 0.8 + 6.4 / 0.8) / 2)
    assert "fixed_8" not in intervals and "correlation" not in intervals


def test_other_data_and_fewer_epochs_are_named() -> None:
    def differs(**values: Any) -> set[str]:
        return {
            one.evidence.differs for one in STUDY.findings(Results([record("none", **values), record(C5, **values)]))
        }

    assert differs() == {"digits, not mnist; 4 epochs, not 100"}
    assert differs(data="mnist", epochs=100) == {""}


def test_variant_with_most_runs_counts() -> None:
    results = Results([record(C5, data="digits"), record(C5, data="mnist"), record(C5, data="mnist", first=2)])
    setting = results.find("headline", C5)
    assert setting is not None and (setting.values["data"], setting.num_runs) == ("mnist", 4)
    assert setting.first(3).per_run("peak") == [97.0, 98.0, 97.0]
    assert setting.curve("raw_bits_by_epoch") == pytest.approx([8.0, 7.0, 7.0, 6.4])


def test_grid_uses_the_first_runs_of_the_headline() -> None:
    results = Results([record(C5), record(C5, first=2, peak=[1.0, 1.0]), record("uniform:10", "grid")])
    grid = results.in_grid(C5)
    assert grid is not None and grid.per_run("peak") == [97.0, 98.0]
    assert Results([record(C5)]).in_grid(C5) is None


def test_plots_follow_from_the_experiments() -> None:
    idents = [plot.ident for plot in STUDY.plots(Results([record("none"), record(C5), record(C6)]))]
    assert idents == ["oland-accuracy", "oland-bits", "oland-layers", "oland-settings"]


def test_committed_records_are_complete_and_agree_with_real_frames() -> None:
    records = STUDY.records_in(COMMITTED)
    committed = Results(records)
    assert set(committed.experiments) == set(TRAINED) and committed.buckets and len(committed.coding) == 3
    assert {setting.num_runs for setting in committed.experiments["headline"].values()} == {1500}
    for one in (one for one in records if one.kind == KIND):
        assert one.values["packets_other_values"] == one.values["packets_other_sizes"] == 0
    default = Setting()
    assert any((s.values["lr"], s.values["l1"]) == (default.lr, default.l1) for s in closest(committed)[:4])
