"""Every study is found by its folder and shows its committed Records on its page."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from laconic.errors import ConfigError, FileError
from laconic.records import Record, write
from laconic_lab.studies import load_study, study_names
from laconic_lab.studies.scoreboard import GOAL, OUTCOMES, index_tables, other_records, outcome

ROOT = Path(__file__).resolve().parents[3]
PAGES = ROOT / "docs" / "studies"

NOT_RUN = {"jang2017": ["measured_h_gpu"], "kothari2021": ["goal_smallest"]}
"""Claims whose experiment has no Records yet."""

each_study = pytest.mark.parametrize("name", study_names())


@cache
def committed(name: str) -> Any:
    return load_study(name).load(ROOT / "results" / name)


def test_unknown_study_is_rejected() -> None:
    with pytest.raises(ConfigError, match="unknown study 'nobody1999': expected one of gpt, homomorphic, jang2017, "):
        load_study("nobody1999")


@each_study
def test_study_is_complete(name: str) -> None:
    study = load_study(name)
    assert study.name == name and study.title and study.experiments and study.kinds
    assert len({claim.key for claim in study.claims}) == len(study.claims)
    with pytest.raises(ConfigError, match="unknown experiment 'figure9': expected one of"):
        study.run("figure9")


@each_study
def test_page_shows_the_tables_of_the_committed_records(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    for table in load_study(name).all_tables(committed(name)):
        shown = f"<!-- {table.title} -->\n{table.to_markdown()}\n<!-- end -->"
        assert shown in page, f"run python docs/studies/refresh.py: {table.title} of {name} is out of date"


def test_overview_shows_the_scoreboard_of_all_committed_records() -> None:
    page = (PAGES / "index.md").read_text(encoding="utf-8")
    studies = map(load_study, study_names())
    others = other_records(ROOT / "results", study_names())
    for table in index_tables((study.judged(ROOT / "results" / study.name) for study in studies), others):
        shown = f"<!-- {table.title} -->\n{table.to_markdown()}\n<!-- end -->"
        assert shown in page, f"run python docs/studies/refresh.py: {table.title} of the overview is out of date"


@each_study
def test_page_opens_with_the_scoreboard_and_figures_of_its_tables(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    opening, _, rest = page.partition("## Run it")
    before, _, after = opening.partition("<!-- Scoreboard -->")
    board, _, prose = after.partition("<!-- end -->")
    assert "<!--" not in before and board.strip() and rest
    assert len(prose.strip().splitlines()) <= 18  # ten points, some of two lines
    # Thousandths and decimals are never typed: they are copied from a table of the page.
    tables = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    assert [figure for figure in re.findall(r"\d+\.\d+", prose) if figure not in tables] == []


def test_page_of_homomorphic_compression_is_short() -> None:
    assert len((PAGES / "homomorphic.md").read_text(encoding="utf-8").splitlines()) < 200


def test_new_records_name_their_commit() -> None:
    """Records without one are older, and marked on the overview."""
    lines = [json.loads(line) for path in (ROOT / "results").rglob("*.jsonl") for line in path.read_text().splitlines()]
    new = [one for one in lines if one["at"] >= "2026-11-17"]
    assert len(new) > 400 and [one["kind"] for one in new if not one["commit"]] == []


@each_study
def test_page_shows_every_figure_of_the_committed_records(name: str) -> None:
    study, page = load_study(name), (PAGES / f"{name}.md").read_text(encoding="utf-8")
    idents = {plot.ident for plot in study.plots(committed(name))}
    for figure, panels in study.figures.items():
        assert {panel.plot for panel in panels} <= idents
        assert f"({name}/{figure}.svg)" in page and (PAGES / name / f"{figure}.svg").exists()


@each_study
def test_every_verdict_says_how(name: str) -> None:
    study = load_study(name)
    findings = study.findings(committed(name))
    without = [claim.key for claim in study.claims if claim not in [finding.claim for finding in findings]]
    assert without == NOT_RUN.get(name, [])
    assert all(finding.values()["how"] in ("measured", "formula", "simulated", "fitted") for finding in findings)
    goals = ("met", "not met", "no interval", "formula only")
    assert all(outcome(one) in (goals if one.claim.section == GOAL else OUTCOMES) for one in findings)
    assert all(one.evidence.sources or one.evidence.how == "formula" for one in findings)


def test_folder_without_records_is_rejected(tmp_path: Path) -> None:
    study = load_study("oland2015")
    with pytest.raises(FileError, match=r"no records of oland2015 in .*: expected headline\.jsonl, "):
        study.load(tmp_path)
    write([Record("study.oland2015", {"part": "headline"})], tmp_path / "headline.jsonl")
    assert len(study.records_in(tmp_path)) == 1
