"""Runs side by side: one table for the terminal and README."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from laconic.errors import InputError
from laconic.records import Record
from laconic.tables import Table

__all__ = ["NOTES", "NOTHING", "WORDS", "compare", "fixed", "fraction"]

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
        rows.append([*cells, fixed(summary.get("accuracy"), 1), _kilobytes(sent), fraction(sent, whole)])
    extra: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = []
    if any(summary.get("bytes_saved") is not None for summary in summaries):
        extra.append(("MB saved", lambda summary: fixed(_scaled(summary.get("bytes_saved"), 1e6), 1)))
    for key, heading in SECONDS:
        if any(summary.get(key) is not None for summary in summaries):
            extra.append((heading, lambda summary, key=key: fixed(summary.get(key), 2)))  # type: ignore[misc]
    if any(summary.get("restarts") for summary in summaries):  # nothing to see where nothing fell over
        extra.append(("restarts", lambda summary: str(summary.get("restarts", NOTHING))))
    for heading, cell in extra:
        columns.append(heading)
        for row, summary in zip(rows, summaries, strict=True):
            row.append(cell(summary))
    return Table(tuple(columns), tuple(tuple(row) for row in rows), 1 + described)


def _values(run: Run) -> Mapping[str, Any]:
    return run.values if isinstance(run, Record) else run


def _baseline(summaries: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Bytes and name of the run that others are compared with."""
    chosen = next((one for one in summaries if one["method"] == BASELINE), summaries[0])
    return float(chosen["wire_bytes_per_iteration"]), str(chosen["method"])


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def fixed(value: float | None, digits: int) -> str:
    """With commas; a dash for what is not known."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def _kilobytes(nbytes: float) -> str:
    return f"{nbytes / 1000:,.1f}"


def fraction(part: float, whole: float) -> str:
    """1, 1/7.9, 1/270; or how many times as much."""
    if part <= 0 or whole <= 0:
        return NOTHING
    times = whole / part
    if times < 0.95:
        return f"{1 / times:.1f}"
    return "1" if times < 1.05 else f"1/{times:.1f}" if times < 9.95 else f"1/{times:,.0f}"
