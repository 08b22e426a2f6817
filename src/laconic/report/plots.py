"""Sections of a report: tables and plots, with the data behind them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

from laconic.report.verdicts import Verdict
from laconic.tables import Table

__all__ = ["Data", "DataTable", "Mark", "Plot", "Question", "Section", "number"]

_LARGEST = sys.float_info.max
Cell: TypeAlias = "str | float | int | None"


def number(value: Any) -> float | int | None:
    """Return a finite number unchanged, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -_LARGEST < value < _LARGEST else None  # isfinite raises for a larger whole number


@dataclass(frozen=True, eq=False)
class Data:
    """Rows that one or several plots draw, and that can be downloaded as CSV.

    Args:
        columns: Column names, with units.
        rows: One cell for each column.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), (self.columns, row)

    def values(self) -> dict[str, Any]:
        """Return the columns as JSON; a text column is a list of its distinct texts and an index for each row."""
        columns: list[dict[str, Any]] = []
        for place in range(len(self.columns)):
            cells = [row[place] for row in self.rows]
            if any(isinstance(cell, str) for cell in cells):
                texts = list(dict.fromkeys(str(cell) for cell in cells if cell is not None))
                index = {text: i for i, text in enumerate(texts)}
                columns.append({"words": texts, "at": [None if cell is None else index[str(cell)] for cell in cells]})
            else:
                columns.append({"numbers": [number(cell) for cell in cells]})
        return {"columns": list(self.columns), "cells": columns}


@dataclass(frozen=True)
class Mark:
    """A value to compare with, such as a baseline's or a claimed one, drawn into a plot as a line.

    Args:
        pick: The value of the plot's ``pick`` with which it is shown; None: always.
    """

    axis: str
    value: float
    label: str
    pick: str | None = None


@dataclass(frozen=True)
class Plot:
    """One chart: columns of its data, mapped to axes and colours.

    The page draws it as interactive SVG; laconic-lab draws SVG files of its documentation from the same objects.

    Args:
        ident: Identifier, unique on the page.
        about: One sentence about what it shows.
        kind: ``line``, ``points`` or ``bars`` (horizontal: texts on the y axis, lengths along x).
        data: The rows that are drawn.
        x: Column of the x axis; the length of bars.
        y: Column of the y axis; the text of bars.
        series: Column that chooses the colour; series can be switched on and off. A name has one colour on the page.
        group: Column that separates several lines of one colour, such as seeds.
        pick: Column of which one value at a time is shown.
        begin: Value of ``pick`` that is shown first; the first by default.
        detail: Further columns that are shown for a point.
        log: Axes that start logarithmic: ``x``, ``y`` or ``xy``.
        stacked: Whether bars of different series follow each other in one line.
        marks: Lines at claimed values.
        low: Column with the lower ends of error bars along y.
        high: Column with their upper ends.
        diagonals: Slopes of lines through the origin, such as 1 for "as predicted".
        zero: Whether bars begin at zero; if not, dots on an axis of the values' range show small differences.
        better: Direction of better values along x and y, -1 for less and 1 for more: the Pareto line is drawn.
    """

    ident: str
    title: str
    about: str
    kind: str
    data: Data
    x: str
    y: str
    series: str | None = None
    group: str | None = None
    pick: str | None = None
    begin: str | None = None
    detail: tuple[str, ...] = ()
    log: str = ""
    stacked: bool = False
    marks: tuple[Mark, ...] = ()
    diagonals: tuple[float, ...] = ()
    low: str | None = None
    high: str | None = None
    zero: bool = True
    better: tuple[int, int] | None = None

    def values(self, data: str) -> dict[str, Any]:
        names = ("x", "y", "series", "group", "pick", "low", "high")
        named = {name: column for name in names if (column := getattr(self, name))}
        for column in (*named.values(), *self.detail):
            assert column in self.data.columns, (self.ident, column)
        return {
            "id": self.ident, "title": self.title, "kind": self.kind, "data": data, **named, "begin": self.begin,
            "detail": self.detail, "log": self.log, "stacked": self.stacked, "diagonals": self.diagonals,
            "zero": self.zero, "better": self.better,
            "marks": [
                {"axis": mark.axis, "value": mark.value, "label": mark.label, "pick": mark.pick}
                for mark in self.marks
                if number(mark.value) is not None
            ],
        }  # fmt: skip


@dataclass(frozen=True)
class DataTable:
    """A table of texts with the numbers behind it, which can be downloaded as CSV."""

    ident: str
    table: Table
    data: Data


class Question(IntEnum):
    """What a section answers. The page has its sections in this order."""

    DDP = 1
    TRANSFORMERS = 2
    PLANNER = 3
    SERVER = 4
    STUDIES = 5
    PARTS = 6
    """Codecs, layers and faults by themselves."""


@dataclass
class Section:
    """A part of the page with a heading.

    Args:
        question: What it answers, which decides where it is on the page.
        verdicts: What to do in each measured situation; the page has them at its top.
    """

    ident: str
    title: str
    about: str = ""
    tables: list[DataTable] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    question: Question = Question.PARTS
    verdicts: list[Verdict] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tables or self.plots)
