"""A table that compares runs, for the terminal and the README."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from laconic.errors import InputError
from laconic.records import Record
from laconic.tables import Table

__all__ = ["NOTES", "NOTHING", "WORDS", "compare", "fixed", "fraction"]

Run: TypeAlias = "Record | Mapping[str, Any]"
"""The summary of a run (``laconic train --json``), or a Record with these values."""

BASELINE = "1"
"""The method that others are compared with."""
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
    "kB are the frames of all workers, sent and received, counted where they leave. Seconds are those of the slowest "
    "worker: encoding may overlap with computing, waiting is the time that exchanges delayed it. One run each: small "
    "differences in accuracy and time are chance."
)


def compare(runs: Sequence[Run]) -> Table:
    """Return a table of runs, in their order. Columns without any figure are left out."""
    summaries = [run.values if isinstance(run, Record) else run for run in runs]
    if not summaries:
        raise InputError("expected at least one run, got none")
    baseline = next((summary for summary in summaries if summary["method"] == BASELINE), summaries[0])
    columns = ["method", "accuracy %", "kB per iteration", f"of method {baseline['method']}"]
    rows = [
        [
            str(summary["method"]),
            fixed(summary.get("accuracy"), 1),
            fixed(summary["wire_bytes_per_iteration"] / 1000, 1),
            fraction(summary["wire_bytes_per_iteration"], baseline["wire_bytes_per_iteration"]),
        ]
        for summary in summaries
    ]

    def add_column(heading: str, cell: Callable[[Mapping[str, Any]], str], place: int | None = None) -> None:
        columns.insert(len(columns) if place is None else place, heading)
        for row, summary in zip(rows, summaries, strict=True):
            row.insert(len(row) if place is None else place, cell(summary))

    described = any("what" in summary for summary in summaries)
    if described:
        add_column(WORDS, lambda summary: str(summary.get("what", "")), 1)
    if any(summary.get("bytes_saved") is not None for summary in summaries):
        add_column("MB saved", lambda summary: fixed(summary.get("bytes_saved"), 1, 1e6))
    for key, heading in SECONDS:
        if any(summary.get(key) is not None for summary in summaries):
            add_column(heading, lambda summary, key=key: fixed(summary.get(key), 2))  # type: ignore[misc]
    if any(summary.get("restarts") for summary in summaries):
        add_column("restarts", lambda summary: str(summary.get("restarts", NOTHING)))
    return Table(tuple(columns), tuple(tuple(row) for row in rows), 1 + described)


def fixed(value: float | None, digits: int, unit: float = 1.0) -> str:
    """Return a number with thousands separators; a dash for None and for what is not finite."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value / unit:,.{digits}f}"


def fraction(part: float, whole: float) -> str:
    """Return a share as 1, 1/7.9 or 1/270, or how many times as much it is."""
    if part <= 0 or whole <= 0:
        return NOTHING
    times = whole / part
    if times < 0.95:
        return f"{1 / times:.1f}"
    return "1" if times < 1.05 else f"1/{times:.1f}" if times < 9.95 else f"1/{times:,.0f}"
