"""Tables as data: ``laconic.cli.output.print_table`` prints one in a terminal, ``to_markdown`` writes it for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Table", "printable"]


@dataclass(frozen=True)
class Table:
    r"""Cells as text. A row with a single cell is the heading of the rows that follow it.

    Args:
        text_columns: Number of leading columns that hold text and are aligned left; figures are aligned right.
        title: Line above the table.
        caption: Line below the table.

    >>> print(Table(("codec", "bits"), [("topk:0.01|qsgd:4", "0.2")]).to_markdown())
    | codec | bits |
    | --- | ---: |
    | topk:0.01\|qsgd:4 | 0.2 |
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    title: str = ""
    caption: str = ""

    def to_markdown(self) -> str:
        """Return the columns and rows as a Markdown table, without title and caption."""
        rules = (" --- |" if number < self.text_columns else " ---: |" for number in range(len(self.columns)))
        return "\n".join([_line(self.columns), "|" + "".join(rules), *map(_line, self.rows)])


def printable(text: str, *, keep: str = "") -> str:
    r"""Return a text with escapes for what a terminal would execute or not show: control codes, half surrogates.

    Args:
        text: For example a name from a file of unknown origin.
        keep: Characters that are left as they are, such as a line feed.

    >>> print(printable("layer\x1b[2J\u202e.weight é"))
    layer\x1b[2J\u202e.weight é
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode("ascii") for one in text
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
