"""Sections that laconic-lab adds to a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.records import Record, read
from laconic.report import build
from laconic_lab.studies.study import claim_records
from report_records import embedded

RESULTS = Path(__file__).parents[2] / "results"


def published(folder: str) -> list[Record]:
    return [record for path in sorted((RESULTS / folder).glob("*.jsonl")) for record in read(path)]


@pytest.mark.parametrize(
    "study, plots, marks",
    [
        ("kothari2021", ["kothari-vgg11-bytes", "kothari-vgg11-time", "kothari-vgg11-frontier", "kothari-staleness"],
         {("kothari-vgg11-bytes", 86.0), ("kothari-vgg11-bytes", 79.0), ("kothari-vgg11-frontier", 137e3)}),
        ("oland2015", ["oland-accuracy", "oland-bits", "oland-layers", "oland-settings", "oland-map"],
         {("oland-bits", 3.55), ("oland-settings", 3.78)}),
        ("jang2017", ["predicted-measured", "jang-table1", "jang-kernels"], {("jang-table1", 1.079)}),
        ("homomorphic", ["homomorphic-rho", "homomorphic-h"], {("homomorphic-h", 1.0)}),
    ],
)  # fmt: skip
def test_section_of_a_study_has_its_plots_with_claims(
    study: str, plots: list[str], marks: set[tuple[str, float]]
) -> None:
    records = published(study)
    claims, failures = claim_records(records)
    report = build(records)
    assert failures == [] and set(plots) <= set(report.plots) and report.runs == 0
    drawn = {(plot["id"], mark["value"]) for plot in embedded(report.html)["plots"] for mark in plot["marks"]}
    assert marks <= drawn
    assert not any("left out" in line for line in report.skipped)
    if study != "homomorphic":
        assert f"{study}-claimed" in report.plots and all(claim.values["study"] == study for claim in claims)


@pytest.mark.parametrize("folder", ["ddp", "cluster", "bench", "faults", "layers", "demo"])
def test_no_published_record_is_left_out(folder: str) -> None:
    report = build(published(folder))
    assert report.plots and not any("left out" in line for line in report.skipped)
