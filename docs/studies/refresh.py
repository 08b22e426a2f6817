"""Put the tables and figures of the committed Records into the studies' pages: python docs/studies/refresh.py"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

from laconic_lab.studies import homomorphic, jang2017, kothari2021, oland2015

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parents[1] / "results"


def refresh(study: ModuleType, name: str) -> None:
    results = study.Results(study.load(RECORDS / name))
    path = HERE / f"{name}.md"
    page = path.read_text(encoding="utf-8")
    for table in study.tables(results):
        place = re.compile(rf"(<!-- {re.escape(table.title)} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, found = place.subn(lambda match, table=table: f"{match[1]}{table.markdown()}\n{match[2]}", page)
        if found != 1:
            raise SystemExit(f"{path.name} has no place for the table {table.title!r}")
    path.write_text(page, encoding="utf-8")
    for drawn in study.draw(results, HERE / name):
        print(drawn.relative_to(HERE))


def main() -> None:
    for study in (oland2015, kothari2021, jang2017, homomorphic):
        refresh(study, study.__name__.rpartition(".")[2])


if __name__ == "__main__":
    main()
