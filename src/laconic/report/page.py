"""Render a report as one HTML file that needs no network and no other file.

Texts of Records never become markup: they are escaped, rows are in a JSON block without any ``<``, and the page's
content security policy allows only our scripts, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from laconic.errors import FileError
from laconic.report import colours
from laconic.report.javascript import formulas_script
from laconic.report.plots import Data, DataTable, Plot, Question, Section
from laconic.report.verdicts import Verdict, verdict_table

__all__ = ["render", "write_page"]

LONG_TEXT = 24
"""A column with texts of more characters than this breaks them into lines."""
FIRST_OF_NUMBERS = {"", *"0123456789+-−<>–"}
SCRIPTS = ("drawing.js", "chart.js", "whatif.js", "page.js")


def render(
    sections: Sequence[Section], *, title: str, origin: Sequence[str] = (), skipped: Sequence[str] = (),
    what_if: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """Return the page.

    Args:
        sections: Sections with at least one table or plot.
        origin: Lines at the end: machine, versions, command.
        skipped: A line for everything that is not shown, with the reason.
        what_if: The result of ``whatif.settings``; None leaves that part out.
    """
    data = _PageData()
    ordered = sorted(sections, key=lambda section: section.question)
    decided = any(section.verdicts for section in ordered)
    parts = [_verdicts(ordered, data)] if decided else []
    links = [("verdicts", "In short")] if decided else []
    # The planner follows what answers the same question by measurements. Runs of one's own come before it.
    before = [section for section in ordered if section.question < Question.PLANNER] or ordered[:1]
    for section in (*before, None, *ordered[len(before) :]):
        if section is not None:
            parts.append(_section(section, data))
            links.append((section.ident, section.title.partition(":")[0]))
        elif what_if is not None:
            parts.append(_asset("whatif.html"))
            links.append(("what-if", "What if"))
    if skipped:
        parts.append(_skipped(skipped))
        links.append(("skipped", "Not shown"))
    scripts = [formulas_script(), *(_asset(name) for name in SCRIPTS)]
    style = _asset("page.css")
    names = colours.assign([plot for section in ordered for plot in section.plots])
    blocks = {"plots": data.plots, "tables": data.tables, "colours": names, "whatIf": what_if}
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}; base-uri 'none'; "
        "form-action 'none'"
    )
    return _PAGE.format(
        title=escape(title), policy=policy, style=style,
        links="\n".join(f'<li><a href="#{escape(ident)}">{escape(text)}</a></li>' for ident, text in links),
        body="\n".join(parts), origin="\n".join(f"<p>{escape(line)}</p>" for line in origin), data=_json(blocks),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )  # fmt: skip


def write_page(text: str, path: Path) -> None:
    """Write a page atomically."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Names of files and texts of Records may hold characters that UTF-8 cannot: they are written as \udc80.
        partial.write_bytes(text.encode("utf-8", "backslashreplace"))
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise FileError(f"cannot write the page to {path}: {error.strerror or error}") from error


class _PageData:
    """Plots and their rows as JSON; rows that several plots share are stored once."""

    def __init__(self) -> None:
        self.tables: dict[str, Any] = {}
        self.plots: list[dict[str, Any]] = []
        self._names: dict[int, str] = {}

    def name(self, data: Data) -> str:
        """Return the key of a plot's rows."""
        if id(data) not in self._names:
            self._names[id(data)] = f"t{len(self.tables)}"
            self.tables[self._names[id(data)]] = data.values()
        return self._names[id(data)]

    def add(self, plot: Plot) -> None:
        assert all(other["id"] != plot.ident for other in self.plots), plot.ident
        self.plots.append(plot.values(self.name(plot.data)))


def _section(section: Section, page_data: _PageData) -> str:
    lines = [f'<section id="{escape(section.ident)}">', f"<h2>{escape(section.title)}</h2>"]
    if section.about:
        lines.append(f"<p>{escape(section.about)}</p>")
    lines += [_table(table, page_data) for table in section.tables]
    if section.plots:
        lines.append('<div class="plots">')
        for plot in section.plots:
            page_data.add(plot)
            lines.append(
                f'<figure data-plot="{escape(plot.ident)}"><figcaption><h3>{escape(plot.title)}</h3>'
                f"<p>{escape(plot.about)}</p></figcaption></figure>"
            )
        lines.append("</div>")
    return "\n".join([*lines, "</section>"])


def _table(data_table: DataTable, page_data: _PageData) -> str:
    ident, table = escape(data_table.ident), data_table.table
    classes = [
        _column_class(i >= table.text_columns, [row[i] for row in table.rows]) for i in range(len(table.columns))
    ]
    head = "".join(f'<th scope="col"{c}>{escape(name)}</th>' for c, name in zip(classes, table.columns, strict=True))
    body = "\n".join(
        f'<tr><th scope="row"{classes[0]}>{escape(row[0])}</th>'
        + "".join(f"<td{c}>{escape(cell)}</td>" for c, cell in zip(classes[1:], row[1:], strict=True))
        + "</tr>"
        for row in table.rows
    )
    notes = f"<p class='note'>{escape(table.caption)}</p>" if table.caption else ""
    return (
        f'<div class="wide" role="region" aria-labelledby="{ident}" tabindex="0">\n<table>\n'
        f'<caption id="{ident}">{escape(table.title)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n'
        '</tbody>\n</table>\n</div>\n<div class="tools"><button type="button" '
        f'data-csv="{page_data.name(data_table.data)}" data-name="{ident}">CSV</button></div>\n{notes}'
    )


def _column_class(is_figure: bool, cells: Sequence[str]) -> str:
    """Return the class of a column: numbers are flush right on one line, long texts break into lines."""
    if is_figure and all(cell[:1] in FIRST_OF_NUMBERS for cell in cells):
        return ' class="figure"'
    return ' class="long"' if max((len(cell) for cell in cells), default=0) > LONG_TEXT else ""


def _verdicts(sections: Sequence[Section], page_data: _PageData) -> str:
    """Return the top of the page: a sentence for each question, and a table of every measured situation."""
    first = [section.verdicts[0] for section in sections if section.verdicts]
    every = [verdict for section in sections for verdict in section.verdicts]
    lines = [f"<p>{_emphasized(one)}</p>" for one in first]
    if len(every) > len(first):
        table = verdict_table(every)
        data = Data(tuple(table.columns), [tuple(row) for row in table.rows])
        lines.append(_table(DataTable("every-verdict", table, data), page_data))
    return "\n".join(
        ['<section id="verdicts">', "<h2>Should I compress, and how?</h2>", '<div class="advice">',
         *lines[: len(first)], "</div>", *lines[len(first) :], "</section>"]
    )  # fmt: skip


def _emphasized(verdict: Verdict) -> str:
    """Return a verdict's sentence with the answer in bold."""
    situation, answer, rest = verdict.sentence, "", ""
    start = situation.index(": ", len(verdict.situation)) + 2
    situation, answer = situation[:start], situation[start:]
    answer, _, rest = answer.partition("; " if verdict.choice is None else ", which")
    joint = "; " if verdict.choice is None else ", which"
    return f"{escape(situation)}<b>{escape(answer)}</b>{escape(joint + rest)}"


def _skipped(skipped: Sequence[str]) -> str:
    lines = "\n".join(f"<li>{escape(line)}</li>" for line in skipped)
    return f'<section id="skipped"><h2>Not shown</h2>\n<ul>\n{lines}\n</ul></section>'


def _json(value: Any) -> str:
    """Return JSON without characters that could end its block."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _asset(name: str) -> str:
    return (resources.files("laconic.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header>
<h1>{title}</h1>
<nav aria-label="Sections"><ul>
{links}
</ul></nav>
<button type="button" id="theme" aria-live="polite">Dark</button>
</header>
<main id="main">
<noscript><p>Plots are drawn by the scripts of this page, and scripts are disabled. Tables are below.</p></noscript>
{body}
</main>
<footer>
{origin}
</footer>
<script type="application/json" id="data">{data}</script>
{scripts}
</body>
</html>
"""
