"""Runs side by side: one table for the terminal, README and the page, and the page itself.

The page is one HTML file that needs nothing else: no script, no network. Its charts are inline SVG and say in words
what they show.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from laconic.errors import FileError, InputError
from laconic.records import Record

__all__ = ["NOTES", "WORDS", "Table", "compare", "page", "write_page"]

Run: TypeAlias = "Record | Mapping[str, Any]"
"""The summary of a run (``laconic train --json``), or a Record whose values are one."""

BASELINE = "1"
WORDS = "what it does"
"""The column of a run's ``what``."""
NOTHING = "–"

SECONDS = (
    ("encode_s", "encode s"),
    ("overlapped_s", "overlapped s"),
    ("communication_s", "waiting s"),
    ("total_s", "total s"),
)

NOTES = (
    "kB are frames of all workers, sent and received, counted where they leave. Seconds are those of the slowest "
    "worker: encode may run beside computing, waiting is how long exchanges held it up. One run each: small "
    "differences in accuracy and time are chance."
)


@dataclass(frozen=True)
class Table:
    """Cells as text. The first ``words`` columns are words, the others figures."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int


def compare(runs: Sequence[Run]) -> Table:
    """The table of some runs, in their order. Columns that no run has figures for are left out."""
    summaries = [_values(run) for run in runs]
    if not summaries:
        raise InputError("expected the figures of at least one run, got none")
    whole, name = _baseline(summaries)
    described = any("what" in summary for summary in summaries)
    columns = [
        "method",
        *([WORDS] if described else []),
        "accuracy %",
        "kB per iteration",
        f"of method {name}",
    ]
    rows = []
    for summary in summaries:
        sent = summary["wire_bytes_per_iteration"]
        cells = [str(summary["method"]), *([str(summary.get("what", ""))] if described else [])]
        rows.append([*cells, _fixed(summary.get("accuracy"), 1), _kilobytes(sent), _fraction(sent, whole)])
    extra: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = []
    if any(summary.get("bytes_saved") is not None for summary in summaries):
        extra.append(("MB saved", lambda summary: _fixed(_scaled(summary.get("bytes_saved"), 1e6), 1)))
    for key, heading in SECONDS:
        if any(summary.get(key) is not None for summary in summaries):
            extra.append((heading, lambda summary, key=key: _fixed(summary.get(key), 2)))  # type: ignore[misc]
    if any(summary.get("restarts") for summary in summaries):  # nothing to see where nothing fell over
        extra.append(("restarts", lambda summary: str(summary.get("restarts", NOTHING))))
    for heading, cell in extra:
        columns.append(heading)
        for row, summary in zip(rows, summaries, strict=True):
            row.append(cell(summary))
    return Table(tuple(columns), tuple(tuple(row) for row in rows), 1 + described)


def page(runs: Sequence[Run], *, title: str = "laconic", command: str | None = None) -> str:
    """One self-contained HTML file that compares runs.

    Args:
        runs: Summaries or Records of them, the one to compare with (method 1, or else the first) among them.
        title: Of the page.
        command: What to type to get these figures again.
    """
    table = compare(runs)
    summaries = [_values(run) for run in runs]
    sent = [(str(one["method"]), float(one["wire_bytes_per_iteration"])) for one in summaries]
    right = [(str(one["method"]), one.get("accuracy")) for one in summaries]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_setting(summaries))}</p>",
        _html_table(table),
        f"<p class='note'>{escape(NOTES)}</p>",
        "<div class='charts'>",
        _byte_chart(sent),
        _accuracy_chart([(name, float(value)) for name, value in right if value is not None]),
        "</div>",
        f"<details><summary>All figures, as CSV</summary><pre tabindex='0'>{escape(_csv(summaries))}</pre></details>",
        *(f"<p class='note'>{line}</p>" for line in _origin(runs, command)),
    ]
    return _PAGE.format(title=escape(title), style=_STYLE, body="\n".join(part for part in parts if part))


def write_page(text: str, path: Path) -> None:
    """Replace ``path`` by a page, as a whole."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise FileError(f"cannot write the page to {path}: {error.strerror or error}") from error


# ------------------------------------------------------------------------------------------------------------ figures


def _values(run: Run) -> Mapping[str, Any]:
    return run.values if isinstance(run, Record) else run


def _baseline(summaries: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Bytes and name of the run that others are compared with."""
    chosen = next((one for one in summaries if one["method"] == BASELINE), summaries[0])
    return float(chosen["wire_bytes_per_iteration"]), str(chosen["method"])


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _fixed(value: float | None, digits: int) -> str:
    return NOTHING if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def _kilobytes(nbytes: float) -> str:
    return f"{nbytes / 1000:,.1f}"


def _fraction(part: float, whole: float) -> str:
    """1, 1/7.9, 1/270; or how many times as much."""
    if part <= 0 or whole <= 0:
        return NOTHING
    times = whole / part
    if times < 0.95:
        return f"{1 / times:.1f}"
    return "1" if times < 1.05 else f"1/{times:.1f}" if times < 9.95 else f"1/{times:,.0f}"


def _setting(summaries: Sequence[Mapping[str, Any]]) -> str:
    """What the runs have in common."""

    def common(key: str) -> Any:
        found = {one.get(key) for one in summaries}
        return found.pop() if len(found) == 1 else None

    workers, servers = common("workers"), common("servers") or 1
    model, data = common("model"), common("data")
    words = []
    if workers:
        words.append(
            f"{servers} parameter server{'s' * (servers != 1)} and {workers} worker{'s' * (workers != 1)}, each a "
            "process of its own"
        )
    if model and data:
        words.append(f"{model} on {data}")
    counts = sorted({one["iterations"] for one in summaries if "iterations" in one})
    if counts:
        words.append(f"{' to '.join(f'{count:,}' for count in dict.fromkeys((counts[0], counts[-1])))} iterations each")
    return "; ".join(words) + "." if words else ""


def _csv(summaries: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for one in summaries for name in one))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(summaries)
    return out.getvalue()


def _origin(runs: Sequence[Run], command: str | None) -> Iterable[str]:
    record = next((run for run in runs if isinstance(run, Record)), None)
    if record is not None:
        words = [f"{record.machine.get('cpu')}, {record.machine.get('cores')} cores"]
        words += [f"{name} {version}" for name, version in record.versions.items()]
        words += [f"commit {record.commit}"] if record.commit else []
        yield escape("; ".join([*words, f"measured {record.at}"]) + ".")
    if command:
        yield f"Again: <code>{escape(command)}</code>"


# --------------------------------------------------------------------------------------------------------------- HTML


def _html_table(table: Table) -> str:
    figures = range(table.words, len(table.columns))
    order = [*figures, *range(1, table.words)]  # words last: on a phone the figures are what fits beside the name
    side = dict.fromkeys(figures, " class='figure'")
    head = "".join(
        f"<th scope='col'{side.get(column, '')}>{escape(table.columns[column])}</th>" for column in (0, *order)
    )
    body = "\n".join(
        f"<tr><th scope='row'>{escape(row[0])}</th>"
        + "".join(f"<td{side.get(column, '')}>{escape(row[column])}</td>" for column in order)
        + "</tr>"
        for row in table.rows
    )
    return (
        "<div class='wide' role='region' aria-labelledby='runs' tabindex='0'>\n<table>\n"
        f"<caption id='runs'>Methods compared</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n"
        "</table>\n</div>"
    )


WIDTH, LEFT, RIGHT, ROW, BAR = 360, 70, 284, 22, 14
"""Of a chart, in the units of its own: about a phone's width, so that letters stay as large as they are."""


def _byte_chart(sent: Sequence[tuple[str, float]]) -> str:
    positive = [value for _, value in sent if value > 0]
    if not positive:
        return ""
    low = math.floor(math.log10(min(positive) / 2))  # the shortest bar still has a length
    high = max(low + 1, math.ceil(math.log10(max(positive))))
    step = -(-(high - low) // 5)
    marks = [((exponent - low) / (high - low), _power(exponent)) for exponent in range(low, high + 1, step)]
    rows = [
        (name, (math.log10(value) - low) / (high - low) if value > 0 else 0.0, f"{_kilobytes(value)} kB")
        for name, value in sent
    ]
    return _chart("bytes", "Bytes per iteration", "logarithmic", rows, marks)


def _accuracy_chart(right: Sequence[tuple[str, float]]) -> str:
    if not right:
        return ""
    marks = [(value / 100, f"{value} %") for value in range(0, 101, 25)]
    rows = [(name, min(max(value / 100, 0.0), 1.0), f"{value:.1f} %") for name, value in right]
    return _chart("accuracy", "Accuracy", "on the test set", rows, marks)


def _power(exponent: int) -> str:
    """A power of ten in bytes, for an axis."""
    units = ("B", "kB", "MB", "GB", "TB")
    unit = min(max(exponent // 3, 0), len(units) - 1)
    return f"{10.0 ** (exponent - 3 * unit):g} {units[unit]}"


def _chart(
    ident: str, title: str, note: str, rows: Sequence[tuple[str, float, str]], marks: Sequence[tuple[float, str]]
) -> str:
    """Bars with the figure behind each; rows are label, length from 0 to 1, and text."""
    bottom = ROW * len(rows) + 4
    spoken = "; ".join(f"method {label}: {text}" for label, _, text in rows)
    lines = [
        f"<figure><figcaption>{escape(title)} <span class='note'>{escape(note)}</span></figcaption>",
        f"<svg viewBox='0 0 {WIDTH} {bottom + 18}' role='img' aria-labelledby='{ident}-title {ident}-words'>",
        f"<title id='{ident}-title'>{escape(title)}</title>",
        f"<desc id='{ident}-words'>{escape(spoken)}</desc>",
    ]
    for share, text in marks:
        x = LEFT + share * (RIGHT - LEFT)
        lines.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='0' y2='{bottom}'/>")
        lines.append(f"<text class='mark' x='{x:.1f}' y='{bottom + 13}'>{escape(text)}</text>")
    for number, (label, share, text) in enumerate(rows):
        y, length = number * ROW + 4, max(share * (RIGHT - LEFT), 0.0)
        lines.append(f"<text class='label' x='{LEFT - 6}' y='{y + 11}'>{escape(label)}</text>")
        lines.append(f"<rect x='{LEFT}' y='{y}' width='{length:.1f}' height='{BAR}'/>")
        lines.append(f"<text x='{LEFT + length + 5:.1f}' y='{y + 11}'>{escape(text)}</text>")
    return "\n".join([*lines, "</svg></figure>"])


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #57606a; --line: #d0d7de; --bar: #1f6feb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9da7b3; --line: #30363d; --bar: #58a6ff; }
}
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; }
.note { color: var(--soft); font-size: .875rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .25rem 0; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th.figure, td.figure { text-align: right; white-space: nowrap; }
thead th.figure { white-space: normal; }
td:not(.figure) { min-width: 15rem; }
tbody th, thead th:first-child { position: sticky; left: 0; background: var(--paper); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 1rem 0; max-width: 32rem; }
figcaption { font-weight: 600; margin-bottom: .25rem; }
figcaption .note { font-weight: normal; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
svg .label { text-anchor: end; }
svg .mark { text-anchor: middle; font-size: 10px; fill: var(--soft); }
svg rect { fill: var(--bar); }
svg line { stroke: var(--line); }
pre { overflow-x: auto; font-size: .8rem; padding: .5rem; border: 1px solid var(--line); }
:focus-visible { outline: 2px solid var(--bar); }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
