"""Write the tables and figures of the committed Records into the studies' pages: python docs/studies/refresh.py."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from laconic.tables import Table
from laconic_lab.studies import load_study, study_names
from laconic_lab.studies.scoreboard import index_tables, other_records
from laconic_lab.studies.study import Study

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parents[1] / "results"


def fill(path: Path, tables: Iterable[Table]) -> None:
    """Write each table to its place on a page."""
    page = path.read_text(encoding="utf-8")
    for table in tables:
        place = re.compile(rf"(<!-- {re.escape(table.title)} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, count = place.subn(lambda match, table=table: f"{match[1]}{table.to_markdown()}\n{match[2]}", page)
        if count != 1:
            raise SystemExit(f"{path.name} must have one place for the table {table.title!r}, has {count}")
    path.write_text(page, encoding="utf-8")


def refresh(study: Study[Any]) -> None:
    results = study.load(RECORDS / study.name)
    fill(HERE / f"{study.name}.md", study.all_tables(results))
    for figure in study.draw(results, HERE / study.name):
        print(figure.relative_to(HERE))


def refresh_index(studies: Iterable[Study[Any]]) -> None:
    others = other_records(RECORDS, study_names())
    fill(HERE / "index.md", index_tables((study.judged(RECORDS / study.name) for study in studies), others))


if __name__ == "__main__":
    every = [load_study(name) for name in study_names()]
    for study in every:
        refresh(study)
    refresh_index(every)
