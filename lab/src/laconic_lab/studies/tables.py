"""Tables of the studies, built on ``laconic.tables.Table``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from laconic.tables import Table

__all__ = ["Table", "make_table", "mean_and_values"]


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table; columns from the left up to the first one that holds only numbers are text."""
    columns_of_text = 0
    for cells in zip(*rows, strict=True):
        if all(cell[:1] in "0123456789+-–." for cell in cells):
            break
        columns_of_text += 1
    return Table(columns, rows, columns_of_text, title)


def mean_and_values(values: Sequence[float], digits: int = 2) -> str:
    """Format a mean, followed by the values themselves where there are several.

    >>> mean_and_values([86.0, 87.0]), mean_and_values([86.0])
    ('86.50 (86.00, 87.00)', '86.00')
    """
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({', '.join(f'{value:.{digits}f}' for value in values)})"
