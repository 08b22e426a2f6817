"""Tables and figures come from Records alone, and say what these say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laconic.errors import ConfigError, FileError
from laconic.records import Record, write
from laconic_lab.studies import oland2015
from laconic_lab.studies.intervals import Interval, mean_interval, quantile
from laconic_lab.studies.oland2015 import Claim, Finding, Results
from laconic_lab.studies.oland2015.figures import FIGURES
from laconic_lab.studies.oland2015.report import C5, C6, closest

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = ROOT / "results" / "oland2015"
PAGE = ROOT / "docs" / "studies" / "oland2015.md"


def record(codec: str, part: str = "headline", first: int = 0, **values: Any) -> Record:
    found = {
        "part": part, "codec": codec, "first_run": first, "runs": 2, "data": "digits", "workers": 5, "epochs": 4,
        "seed": 0, "device": "cpu", "lr": 0.8, "l1": 1e-5, "decay": 0.99, "batch": 100, "pixels": "unit",
        "sends": "weights", "raw_bits": [7.0, 7.2], "whole_bits": [7.0, 8.0], "coded_bits": [4.0, 4.0],
        "peak": [97.0, 98.0], "final": [96.0, 97.0], "peak_epoch": [50, 100], "near_peak_epoch": [40, 80],
        "raw_bits_by_epoch": [8.0, 7.0, 7.0, 6.4], "coded_bits_by_epoch": [5.0, 4.0, 4.0, 3.0],
        "accuracy_by_epoch": [90.0, 95.0, 96.0, 96.5], "packets_compared": 0, "packets_other_values": 0,
        "packets_other_sizes": 0,
    }  # fmt: skip
    return Record("study.oland2015", found | values)


def by_key(results: Results) -> dict[str, Finding]:
    return {finding.claim.key: finding for finding in oland2015.findings(results)}


def test_claims_are_measured_on_pairs_of_runs() -> None:
    results = Results([
        record("none"), record("none", first=2, peak=[90.0, 91.0]),
        record(C5), record(C6, peak=[97.1, 98.3], peak_epoch=[40, 80], coded_bits=[4.0, 5.0]),
    ])  # fmt: skip
    found = by_key(results)
    assert found["c5_raw_bits"].measured.mean == pytest.approx(7.1)
    assert found["c5_coded_times"].measured.mean == pytest.approx(8.0)
    assert found["c6_peak"].measured.mean == pytest.approx(0.2) and found["c6_peak"].measured.runs == 2
    assert found["c6_epochs"].measured.mean == pytest.approx(20.0)
    assert found["c6_overall"].measured.mean == pytest.approx((8 / 0.8 + 6.4 / 0.8) / 2)
    assert "fixed_8" not in found and "correlation" not in found


def test_the_study_of_most_runs_speaks() -> None:
    results = Results([record(C5, data="digits"), record(C5, data="mnist"), record(C5, data="mnist", first=2)])
    setting = results.find("headline", C5)
    assert setting is not None and (setting.values["data"], setting.num_runs) == ("mnist", 4)
    assert setting.first(3).runs("peak") == [97.0, 98.0, 97.0]
    assert setting.curve("raw_bits_by_epoch") == pytest.approx([8.0, 7.0, 7.0, 6.4])


@pytest.mark.parametrize(
    "relation, interval, verdict",
    [
        ("=", (5.0, 4.9, 5.1), "yes"),
        ("=", (5.0, 4.0, 6.0), "not seen"),
        ("=", (5.2, 5.15, 5.25), "close"),
        ("=", (6.0, 5.9, 6.1), "no"),
        (">", (5.2, 5.1, 5.3), "yes"),
        (">", (5.0, 4.9, 5.1), "not seen"),
        (">", (4.8, 4.7, 4.9), "no"),
        ("<", (4.8, 4.7, 4.9), "yes"),
        ("<", (5.2, 5.1, 5.3), "no"),
        ("best", (5.0, 5.0, 5.0), "yes"),
        ("best", (7.0, 4.0, 8.0), "not seen"),
        ("best", (7.0, 6.0, 8.0), "no"),
    ],
)
def test_verdicts(relation: str, interval: tuple[float, float, float], verdict: str) -> None:
    claim = Claim("x", "x", "1", 5.0, relation, close=0.3)
    assert Finding(claim, Interval(*interval, 10), "digits").verdict == verdict
    assert Finding(claim, Interval(*interval, 1), "digits").verdict == "one run"


def test_intervals() -> None:
    assert mean_interval([1.0]) == (1.0, 1.0, 1.0, 1)
    mean, low, high, runs = mean_interval([1.0, 2.0, 3.0])
    assert (mean, runs) == (2.0, 3) and high - 2.0 == pytest.approx(4.303 / 3**0.5, rel=1e-3) == 2.0 - low
    assert [quantile(n) for n in (16, 30, 10**6)] == pytest.approx([2.120, 2.042, 1.960], abs=2e-3)
    assert mean_interval([2.0, 4.0]).map(lambda x: 1 / x).mean == pytest.approx(1 / 3)


def test_grid_borrows_the_same_runs_from_the_headline() -> None:
    results = Results([record(C5), record(C5, first=2, peak=[1.0, 1.0]), record("uniform:10", "grid")])
    found = results.in_grid(C5)
    assert found is not None and found.runs("peak") == [97.0, 98.0]
    assert Results([record(C5)]).in_grid(C5) is None


def test_figures_are_the_same_for_the_same_records(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = Results([record("none"), record(C5), record(C6)])
    first, again = (oland2015.draw(results, tmp_path / name) for name in ("a", "b"))
    assert [path.name for path in first] == ["figure5.svg", "learning.svg"]
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(first, again, strict=True))
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError):
        oland2015.draw(results, tmp_path / "file")


def test_figures_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"laconic\[plots\]"):
        oland2015.draw(Results([record("none")]), tmp_path)


def test_folder_without_records(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no records"):
        oland2015.load(tmp_path)
    write([record("none")], tmp_path / "headline.jsonl")
    assert len(oland2015.load(tmp_path)) == 1


# ---------------------------------------------------------------------------------------------- what is committed


@pytest.fixture(scope="module")
def committed() -> Results:
    return Results(oland2015.load(COMMITTED))


def test_committed_records_are_whole_and_agree_with_real_frames(committed: Results) -> None:
    assert set(committed.parts) == set(oland2015.PARTS)
    assert {setting.num_runs for setting in committed.parts["headline"].values()} == {1500}
    for record in oland2015.load(COMMITTED):
        assert record.values["packets_other_values"] == record.values["packets_other_sizes"] == 0
    default = oland2015.Setting()
    assert any((s.values["lr"], s.values["l1"]) == (default.lr, default.l1) for s in closest(committed)[:4])


def test_page_shows_the_tables_of_the_committed_records(committed: Results) -> None:
    page = PAGE.read_text()
    for table in oland2015.tables(committed):
        assert table.markdown() in page, f"docs/studies/oland2015.md is older than the Records: {table.title}"


def test_page_shows_the_figures_of_the_committed_records(committed: Results) -> None:
    page = PAGE.read_text()
    for name, (part, _) in FIGURES.items():
        assert part in committed.parts and f"(oland2015/{name}.svg)" in page
        assert (PAGE.parent / "oland2015" / f"{name}.svg").exists()
