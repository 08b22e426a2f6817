"""Put the tables and figures of the committed Records into docs/studies/oland2015.md: python docs/studies/refresh.py"""

from __future__ import annotations

import re
from pathlib import Path

from laconic.studies import oland2015

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parents[1] / "results" / "oland2015"
PAGE = HERE / "oland2015.md"


def main() -> None:
    results = oland2015.Results(oland2015.load(RECORDS))
    page = PAGE.read_text(encoding="utf-8")
    for table in oland2015.tables(results):
        place = re.compile(rf"(<!-- {re.escape(table.title)} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, found = place.subn(lambda match, table=table: f"{match[1]}{table.markdown()}\n{match[2]}", page)
        if found != 1:
            raise SystemExit(f"{PAGE.name} has no place for the table {table.title!r}")
    PAGE.write_text(page, encoding="utf-8")
    for path in oland2015.draw(results, HERE / "oland2015"):
        print(path.relative_to(HERE))


if __name__ == "__main__":
    main()
