"""What a page is made of: sections of tables and plots, and the rows behind each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = ["Data", "Figures", "Mark", "Plot", "Section", "number"]

Cell: TypeAlias = "str | float | int | None"


def number(value: Any) -> float | int | None:
    """A finite number, or None: a Record may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True, eq=False)
class Data:
    """Rows of one kind. Several plots may draw the same; its CSV is all of it.

    Args:
        columns: Names, with units.
        rows: As many cells each.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), (self.columns, row)

    def values(self) -> dict[str, Any]:
        """Column by column; words as numbers of a list of them."""
        found = []
        for place in range(len(self.columns)):
            cells = [row[place] for row in self.rows]
            if any(isinstance(cell, str) for cell in cells):
                words = list(dict.fromkeys(str(cell) for cell in cells if cell is not None))
                numbers = {word: i for i, word in enumerate(words)}
                found.append({"words": words, "at": [None if c is None else numbers[str(c)] for c in cells]})
            else:
                found.append({"numbers": [number(cell) for cell in cells]})
        return {"columns": list(self.columns), "cells": found}


@dataclass(frozen=True)
class Mark:
    """A value that others claim, drawn into a plot as a line."""

    axis: str
    value: float
    label: str


@dataclass(frozen=True)
class Plot:
    """One chart.

    Args:
        ident: Unique on the page.
        title: Over it.
        about: What it shows, in a sentence.
        kind: ``line``, ``points`` or ``bars`` (with a word on the y axis and lengths along x).
        data: What is behind it.
        x: Column; of bars the lengths.
        y: Column; of bars the words.
        series: Column by which rows are coloured, and switched on and off.
        group: Column of several lines in one colour, such as seeds.
        pick: Column of which one value at a time is shown.
        begin: The value that is shown first; the first by default.
        detail: Columns that are told of a point beside x and y.
        log: Axes that begin logarithmic: ``x``, ``y`` or ``xy``.
        stacked: Of bars: series follow each other instead of lying below each other.
        marks: Lines at claimed values.
        low: Column with the lower ends of error bars along y.
        high: Column with their upper ends.
        diagonals: Slopes of lines through the origin, such as 1 for "as predicted".
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

    def values(self, data: str) -> dict[str, Any]:
        names = ("x", "y", "series", "group", "pick", "low", "high")
        named = {name: column for name in names if (column := getattr(self, name))}
        for column in (*named.values(), *self.detail):
            assert column in self.data.columns, (self.ident, column)
        return {
            "id": self.ident, "title": self.title, "kind": self.kind, "data": data, **named, "begin": self.begin,
            "detail": self.detail, "log": self.log, "stacked": self.stacked, "diagonals": self.diagonals,
            "marks": [{"axis": mark.axis, "value": mark.value, "label": mark.label} for mark in self.marks],
        }  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """A table: text to look at, and the numbers behind it.

    Args:
        title: Over it.
        columns: Headings.
        rows: Text.
        words: How many columns, from the first, are words; others are set as figures.
        data: For its CSV.
        notes: Below it.
    """

    ident: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    words: int
    data: Data
    notes: str = ""


@dataclass
class Section:
    """A part of the page with a heading."""

    ident: str
    title: str
    about: str = ""
    tables: list[Figures] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tables or self.plots)
