"""Sections that laconic-lab adds to a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laconic.records import Record, read
from laconic.report import build
from laconic_lab.studies.study import claim_records
from report_records import embedded, record

RESULTS = Path(__file__).parents[2] / "results"


def published(folder: str) -> list[Record]:
    return [record for path in sorted((RESULTS / folder).glob("*.jsonl")) for record in read(path)]


def lines_of(page: dict[str, Any], ident: str) -> dict[tuple[Any, ...], list[float]]:
    """Return the x values of each line of a plot, in the order in which they are joined."""
    (plot,) = (plot for plot in page["plots"] if plot["id"] == ident)
    table = page["tables"][plot["data"]]

    def column(part: str) -> list[Any]:
        cells = table["cells"][table["columns"].index(plot[part])]
        return cells["numbers"] if "numbers" in cells else cells["at"]

    named = [column(part) for part in ("pick", "series", "group") if part in plot]
    lines: dict[tuple[Any, ...], list[float]] = {}
    for x, *names in zip(column("x"), *named, strict=True):
        if x is not None:
            lines.setdefault(tuple(names), []).append(x)
    return lines


def turned_back(page: dict[str, Any]) -> list[str]:
    """Return the line plots in which a line turns back, as lines do that join several runs."""
    plots = [plot["id"] for plot in page["plots"] if plot["kind"] == "line"]
    return [ident for ident in plots if any(line != sorted(line) for line in lines_of(page, ident).values())]


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
    page = embedded(report.html)
    drawn = {(plot["id"], mark["value"]) for plot in page["plots"] for mark in plot["marks"]}
    assert marks <= drawn and turned_back(page) == []
    assert not any("left out" in line for line in report.skipped)
    if study != "homomorphic":
        assert f"{study}-claimed" in report.plots and all(claim.values["study"] == study for claim in claims)


@pytest.mark.parametrize("folder", ["ddp", "cluster", "bench", "faults", "gpu", "layers", "demo"])
def test_no_published_record_is_left_out(folder: str) -> None:
    report = build(published(folder))
    assert report.plots and not any("left out" in line for line in report.skipped)
    assert turned_back(embedded(report.html)) == []


def test_each_seed_of_a_training_is_a_line_of_its_own() -> None:
    page = embedded(build(read(RESULTS / "ddp" / "lenet5-100mbit.jsonl")).html)
    assert len(lines_of(page, "ddp-accuracy-time")) == 18 and turned_back(page) == []  # 6 ways, 3 seeds


def fsdp_records(valid: bool) -> list[Record]:
    common = {"nodes": 2, "shards": 2}
    steps = [("hsdp", "HSDP", 1.0, 4e6), ("laconic ef|qsgd:4", "`ef|qsgd:4`", 0.25, 5e5)]
    records = [
        record("bench.fsdp", link="100mbit", way=way, title=title, step_s=seconds, step_speed_up=1.0 / seconds,
               node_nbytes_per_step=sent, valid=valid, **common)
        for way, title, seconds, sent in steps
    ]  # fmt: skip
    return records + [
        fsdp_loss(way, title, loss, goal=2.505) for (way, title, _, _), loss in zip(steps, (2.50, 2.51), strict=True)
    ]


def fsdp_loss(way: str, title: str, loss: float, goal: float) -> Record:
    values = {"way": way, "title": title, "loss": loss, "goal_loss": goal, "nodes": 2, "shards": 2}
    return record("bench.fsdp.loss", curve=[[1, 3.0], [2, loss]], **values)


def test_fsdp_section_has_steps_losses_and_a_verdict() -> None:
    report = build(fsdp_records(valid=True))
    assert {"fsdp-steps", "fsdp-loss"} <= set(report.plots) and report.skipped == ()
    assert (
        "which is 4.00 times as fast as HSDP and sends 1/8.0 of its bytes; last loss 2.510 beside 2.500" in report.html
    )
    local = record(
        "bench.fsdp", **{**fsdp_records(True)[1].values, "way": "local 20 ef|sign", "title": "local", "step_s": 0.1}
    )
    assert "take local" not in build([*fsdp_records(valid=True), local]).html  # its loss was not measured
    second = [fsdp_loss("hsdp", "HSDP", 2.60, 2.605), fsdp_loss("laconic ef|qsgd:4", "`ef|qsgd:4`", 2.63, 2.605)]
    several = build([*fsdp_records(valid=True), *second, fsdp_loss("hsdp", "HSDP", 9.0, 9.018)])
    assert "last loss 2.570 beside 2.550, mean of 2 seeds" in several.html
    assert len(lines_of(embedded(several.html), "fsdp-loss")) == 5 and turned_back(embedded(several.html)) == []
    unreliable = build(fsdp_records(valid=False))
    assert "fsdp-steps" not in unreliable.plots and "times as fast as HSDP" not in unreliable.html


def test_verdict_on_ddp_suits_every_optimizer_and_follows_the_page_on_choosing() -> None:
    text = build(read(RESULTS / "ddp" / "links.jsonl")).html
    assert "DDP step, vgg11, 2 ranks, 100 Mbit/s: <b>take qsgd:4</b>" in text
    assert "no slow link" in text and "do not compress" in text  # docs/choosing.md: none: plain DDP


def test_server_verdict_weighs_time_against_accuracy() -> None:
    text = build(published("kothari2021")).html
    assert "Parameter server, VGG-11, 100 Mbit/s: <b>take method laconic</b>" in text  # as docs/choosing.md
    assert "take method 6" not in text and "take method 5" not in text  # faster or smaller, but they lose points


@pytest.mark.parametrize("folder", ["bench", "ddp", "gpt", "pipeline"])
def test_no_line_of_published_records_joins_two_runs(folder: str) -> None:
    assert turned_back(embedded(build(published(folder)).html)) == []


def test_line_of_one_setting_is_not_drawn_for_another() -> None:
    """A baseline belongs to a size of the model: it would mislead beside another."""
    (plot,) = (plot for plot in embedded(build(published("gpt")).html)["plots"] if plot["id"] == "gpt-bytes")
    marks = {mark["label"]: mark["pick"] for mark in plot["marks"]}
    assert len(marks) == 3 and all(label.endswith(f", {pick}") for label, pick in marks.items())
