"""Write the tables and figures of the committed Records into the studies' pages: python docs/studies/refresh.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from laconic_lab.studies import load_study, study_names
from laconic_lab.studies.study import Study

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parents[1] / "results"


def refresh(study: Study[Any]) -> None:
    results = study.load(RECORDS / study.name)
    path = HERE / f"{study.name}.md"
    page = path.read_text(encoding="utf-8")
    for table in study.all_tables(results):
        place = re.compile(rf"(<!-- {re.escape(table.title)} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, count = place.subn(lambda match, table=table: f"{match[1]}{table.to_markdown()}\n{match[2]}", page)
        if count != 1:
            raise SystemExit(f"{path.name} must have one place for the table {table.title!r}, has {count}")
    path.write_text(page, encoding="utf-8")
    for figure in study.draw(results, HERE / study.name):
        print(figure.relative_to(HERE))


if __name__ == "__main__":
    for name in study_names():
        refresh(load_study(name))
