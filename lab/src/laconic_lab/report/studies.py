"""Sections of studies: claims beside findings, and the study's plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from laconic.records import Record
from laconic.report.plots import Cell, Data, DataTable, Mark, Plot, Question, Section
from laconic_lab.studies.claims import Finding, claims_table
from laconic_lab.studies.study import Study

__all__ = ["study_section"]


def study_section(study: Study[Any], records: Sequence[Record], question: Question = Question.STUDIES) -> Section:
    """Return the section of a study about these Records."""
    results = study.results(records)
    findings = study.findings(results)
    tables = [_claims(study.name, findings)] if findings else []
    plots = [*study.plots(results), *_measured_over_claimed(study.name, findings)]
    return Section(
        study.name, study.title, tables=tables, plots=plots, question=question, verdicts=study.verdicts(results)
    )


def _claims(study: str, findings: Sequence[Finding]) -> DataTable:
    columns = ("key", "claim", "section", "relation", "claimed", "tolerance", "unit", "measured", "low", "high", "runs",
               "how", "verdict", "on")  # fmt: skip
    values = [finding.values() for finding in findings]
    table = claims_table(findings)
    data = Data(columns, [tuple(one[name] for name in columns) for one in values])
    shown = replace(table, text_columns=len(table.columns), title="Claims and findings")
    return DataTable(f"{study}-claims", shown, data)


def _measured_over_claimed(study: str, findings: Sequence[Finding]) -> Iterator[Plot]:
    rows: list[tuple[Cell, ...]] = [
        (claim.statement, interval.mean / claim.value, interval.mean, claim.value, claim.unit, how)
        for claim, (interval, _, how, *_) in findings
        if claim.relation == "=" and claim.value
    ]
    if rows:
        data = Data(("claim", "found over claimed", "found", "claimed", "unit", "how"), rows)
        yield Plot(f"{study}-claimed", "Found over claimed", "Claims that state a value: 1 is the paper's.", "bars",
                   data, "found over claimed", "claim", detail=("found", "claimed", "unit", "how"), zero=False,
                   marks=(Mark("x", 1.0, "claimed"),))  # fmt: skip
