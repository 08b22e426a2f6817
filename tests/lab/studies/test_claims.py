"""One rule for all studies decides whether a claim holds, and every verdict says how its value was obtained."""

from __future__ import annotations

from typing import Any

import pytest

from laconic.records import Record
from laconic_lab.studies import load_study
from laconic_lab.studies.claims import Claim, Evidence, Finding, claims_table, findings_of, verdict
from laconic_lab.studies.intervals import Interval, difference_interval, mean_interval, quantile
from laconic_lab.studies.scoreboard import outcome, scoreboard
from laconic_lab.studies.study import claim_records


@pytest.mark.parametrize("relation, interval, expected", [
    ("=", (5.0, 4.9, 5.1), "yes"), ("=", (5.2, 5.15, 5.25), "yes"), ("=", (5.0, 4.0, 6.0), "undecided"),
    ("=", (5.3, 5.1, 5.5), "undecided"), ("=", (6.0, 5.9, 6.1), "no"), (">", (5.2, 5.1, 5.3), "yes"),
    (">", (5.0, 4.9, 5.1), "undecided"), (">", (4.8, 4.7, 4.9), "no"), ("<", (4.8, 4.7, 4.9), "yes"),
    ("<", (4.0, 3.0, 6.0), "undecided"), ("<", (5.2, 5.1, 5.3), "no"), ("best", (5.0, 5.0, 5.0), "yes"),
    ("best", (7.0, 4.0, 8.0), "undecided"), ("best", (7.0, 6.0, 8.0), "no"),
])  # fmt: skip
def test_verdict_compares_the_whole_interval(
    relation: Any, interval: tuple[float, float, float], expected: str
) -> None:
    claim = Claim("x", "x", "1", 5.0, relation, tolerance=0.3)
    assert verdict(claim, Interval(*interval, 10)) == expected
    assert verdict(claim, Interval(*interval, 1)) == f"{expected}, one run"
    assert verdict(claim, Interval(*interval, 1), "formula") == expected


def test_findings_cover_the_claims_with_evidence() -> None:
    known = Claim("a", "first", "1", 2.0, "<", "s", evidence=lambda x: Evidence(Interval.exact(x), "a bench", "fitted"))
    unknown = Claim("b", "second", "2", 2.0)
    (finding,) = findings_of([known, unknown], 1.5)
    assert finding.values() == {
        "key": "a", "claim": "first", "section": "1", "relation": "<", "claimed": 2.0, "tolerance": 0.0, "unit": "s",
        "measured": 1.5, "low": 1.5, "high": 1.5, "runs": 1, "difference": -0.5, "how": "fitted",
        "verdict": "yes, fitted", "on": "a bench", "differs": "",
    }  # fmt: skip
    (row,) = claims_table([finding]).rows
    assert row == ("first", "1", "< 2 s", "1.5", "-0.5", "fitted", "yes, fitted", "a bench")


def test_table_shows_tolerance_interval_and_ties() -> None:
    equal = Claim("a", "a", "1", 6.8, "=", "bits", 0.34)
    best = Claim("b", "b", "1", 6.0, "best")
    findings = [
        Finding(equal, Evidence(Interval(6.704, 6.701, 6.707, 1500), "mnist")),
        Finding(best, Evidence(Interval(10, 2, 10, 50), "mnist")),
    ]
    rows = claims_table(findings).rows
    assert rows[0][2:4] == ("6.8 ± 0.34 bits", "6.704 (6.701 to 6.707)") and rows[0][6] == "yes"
    assert rows[1][3] == "10, tied with 2 to 10" and rows[1][6] == "undecided"


@pytest.mark.parametrize("section, interval, how, differs, expected", [
    ("1", (4.0, 3.9, 4.1, 3), "measured", "", "reproduced"),
    ("1", (4.9, 4.7, 5.1, 3), "measured", "", "not reproduced"),
    ("1", (4.0, 3.9, 4.1, 3), "measured", "20 epochs", "set-up differs"),
    ("1", (4.0, 3.9, 4.1, 3), "fitted", "", "fitted"), ("1", (4.0, 4.0, 4.0, 1), "formula", "", "formula only"),
    ("goal", (4.0, 3.9, 4.1, 3), "measured", "", "met"), ("goal", (4.9, 4.7, 5.1, 3), "measured", "", "not met"),
    ("goal", (4.0, 4.0, 4.0, 1), "measured", "", "no interval"),
    ("goal", (6.0, 6.0, 6.0, 1), "measured", "", "not met"),
])  # fmt: skip
def test_outcome_needs_the_whole_interval_and_the_papers_set_up(
    section: str, interval: tuple[float, float, float, int], how: Any, differs: str, expected: str
) -> None:
    finding = Finding(Claim("x", "x", section, 5.0, "<"), Evidence(Interval(*interval), "", how, (), differs))
    assert outcome(finding) == expected


def test_scoreboard_names_epochs_and_machine_and_marks_records_without_commit() -> None:
    cpu = Record("run", {"epochs": 20, "accuracy": [1.0]}, machine={"cpu": "AMD EPYC", "cores": 2}, commit="abc")
    gpu = Record("run", {"steps": 3000, "validation_loss": [1.0]}, machine={"gpu": "NVIDIA H200"}, commit=None)
    records = {id(one.values): one for one in (cpu, gpu)}
    evidence = Evidence(Interval(4.0, 3.9, 4.1, 3), "", sources=[cpu.values, gpu.values], differs="two layers")
    table = scoreboard([Finding(Claim("x", "a loss", "1", 5.0, "<", "%"), evidence)], lambda v: records[id(v)])
    assert table.rows == [(
        "a loss", "< 5 %", "4.000 (3.900 to 4.100)", "set-up differs: two layers", "3", "20, 3,000 steps",
        "EPYC, 2 cores, H200 †",
    )]  # fmt: skip


def test_claims_checked_by_the_papers_formula_say_so() -> None:
    study = load_study("jang2017")
    findings = {one.claim.key: one for one in study.findings(study.results([]))}
    assert set(findings) == {"crossover", "beyond_one_node", "gzip_exceeds", "gzip_loses", "h_16"}
    assert {one.evidence.how for one in findings.values()} == {"formula"}
    assert findings["gzip_loses"].evidence.interval.mean == 25 and findings["gzip_loses"].verdict == "yes"
    assert findings["crossover"].evidence.interval.mean == pytest.approx(8.02357, rel=1e-5)
    assert findings["gzip_exceeds"].evidence.interval.mean == 7
    assert findings["beyond_one_node"].evidence.interval.mean == pytest.approx(120 * 125 / 233)


KERNELS = {"device": "cpu", "batch": 16, "groups": {"convolution": 0.5, "matrix product": 0.25}}


def test_claim_records_name_how() -> None:
    records, skipped = claim_records([Record("jang2017.kernels", KERNELS, seed=7), Record("something.else", {})])
    how = {record.values["key"]: record.values["how"] for record in records}
    assert how.pop("gemm") == "measured" and set(how.values()) == {"formula"} and len(how) == 5
    assert not skipped and {record.values["study"] for record in records} == {"jang2017"}
    assert all(record.kind == "study.claim" and record.seed == 7 for record in records)


def test_study_whose_records_lack_a_field_is_named() -> None:
    records, skipped = claim_records([Record("jang2017.kernels", {"device": "cpu"}), Record("kothari2021.run", {})])
    assert records == [] and skipped == [
        "claims of jang2017: Record of kind jang2017.kernels: batch is missing",
        "claims of kothari2021: Record of kind kothari2021.run: part is missing",
    ]


@pytest.mark.parametrize("error", [AttributeError, TypeError, KeyError, ZeroDivisionError])
def test_error_in_a_claims_function_is_not_swallowed(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def broken(results: object) -> None:
        raise error("a bug")

    study = load_study("jang2017")
    monkeypatch.setattr(type(study), "findings", lambda self, results: broken(results))
    with pytest.raises(error):
        claim_records([Record("jang2017.kernels", KERNELS)])


def test_mean_interval_is_students() -> None:
    assert mean_interval([1.0]) == (1.0, 1.0, 1.0, 1)
    mean, low, high, runs = mean_interval([1.0, 2.0, 3.0])
    assert (mean, runs) == (2.0, 3) and high - 2.0 == pytest.approx(4.303 / 3**0.5, rel=1e-3) == 2.0 - low
    assert [quantile(n) for n in (16, 30, 10**6)] == pytest.approx([2.120, 2.042, 1.960], abs=2e-3)
    assert mean_interval([2.0, 4.0]).map(lambda x: 1 / x).mean == pytest.approx(1 / 3)


def test_difference_interval_is_welchs() -> None:
    assert difference_interval([3.0], [1.0, 2.0]) == (1.5, 1.5, 1.5, 1)
    assert difference_interval([3.0, 3.0], [1.0, 1.0]) == (2.0, 2.0, 2.0, 2)
    mean, low, high, runs = difference_interval([1.0, 2.0, 3.0], [4.0, 4.0, 4.0])
    # All variance is in the first sample: its own interval of two degrees of freedom, shifted.
    assert (mean, runs) == (-2.0, 3) and high - mean == pytest.approx(4.303 / 3**0.5, rel=1e-3) == mean - low
