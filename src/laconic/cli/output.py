"""Output of the commands: results on stdout, everything else on stderr. With ``--json`` stdout is one JSON object."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID
from rich.table import Column
from rich.text import Text

from laconic.errors import FileError
from laconic.tables import printable

if TYPE_CHECKING:
    from laconic.tables import Table

__all__ = [
    "check_writable",
    "encodable",
    "encode_everything",
    "examples",
    "loading",
    "print_json",
    "print_stderr",
    "print_table",
    "print_text",
    "progress_bar",
    "stdout_console",
]  # fmt: skip

UNFOLDED, NAME, LONG_WORD = 1000, 30, 20
PIPED_WIDTH = 160
"""Columns if stdout is not a terminal: tables in a file or a log must not be folded to 80. $COLUMNS has precedence."""


def stdout_console() -> Console:
    piped = not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdecimal()
    return Console(width=PIPED_WIDTH if piped else None, highlight=False, soft_wrap=False)


_ASCII = {
    "…": "...", "×": "x", "−": "-", "–": "-", "µ": "u", "²": "^2", "≤": "<=", "≥": ">=", "±": "+-", "≈": "~",
    "→": "->", "·": "-", "•": "*", "█": "#", "▁": "_", "▂": "_", "▃": "-", "▄": "-", "▅": "=", "▆": "=", "▇": "#",
    "━": "-", "╸": "-", "╺": "-", "─": "-", "│": "|", "✓": "+", "✗": "x", "“": '"', "”": '"', "’": "'", "ρ": "rho",
    "†": "*", "\N{NO-BREAK SPACE}": " ",
}  # fmt: skip


_HEAD_RULE = "    \n" * 2 + " -- \n" + "    \n" * 5
"""A table with a line under its head and no other, as rich describes boxes."""


def _spell(error: UnicodeError) -> tuple[str, int]:
    """Return characters that a terminal does not have in those of ASCII, for ``errors`` of a text stream."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_ascii, error.object[error.start : error.end])), error.end


def _ascii(character: str) -> str:
    """Return the spelling of a character, or its letter without an accent."""
    letter = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return _ASCII.get(character, letter or "?")


codecs.register_error("laconic.spell", _spell)


def encode_everything(*streams: Any) -> None:
    """Make streams print in their own encoding what they can, and the rest in ASCII: no text ends in an error."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and not _is_unicode(stream):
            stream.reconfigure(errors="laconic.spell")


def encodable(text: str) -> str:
    """Return a text in characters that stdout has."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "laconic.spell").decode(encoding)


def _is_unicode(stream: Any) -> bool:
    return str(getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def print_stderr(message: str) -> None:
    """Print one line on stderr without markup, folding or control codes."""
    print(printable(message.replace("\n", " ")), file=sys.stderr)


def print_json(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=not _is_unicode(sys.stdout), indent=2)
    if not text.isprintable():  # a line feed outside of strings is JSON's own; json escapes those inside
        text = "".join(one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text)
    print(text)


def print_text(*lines: str, wrap: bool = False) -> None:
    """Print lines on stdout; brackets are not markup. ``wrap`` breaks long lines between words."""
    for line in lines:
        stdout_console().print(encodable(printable(line, keep="\n")), markup=False, soft_wrap=not wrap)


def print_table(table: Table, *, markup: bool = False, wide: bool = False) -> None:
    """Print a table on stdout, title and caption as lines of their own. Cells that do not fit are folded, not cut off.

    Args:
        table: The table. A row with a single cell begins a section; empty headings are not shown.
        markup: Whether cells contain rich's markup, such as ``[green]met[/green]``.
        wide: Fold nothing if stdout is a file or a pipe.
    """
    from rich import box
    from rich import table as rich_table

    # rich would draw a frame of "|" in ASCII, the sign that also joins the stages of a codec.
    lines = box.SIMPLE_HEAD if _is_unicode(sys.stdout) else box.Box(_HEAD_RULE, ascii=True)
    shown = rich_table.Table(
        show_header=any(table.columns), box=lines if any(table.columns) else None, pad_edge=False,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    console = stdout_console()
    if wide and not console.is_terminal:
        console.width = UNFOLDED
    rows = [[encodable(printable(cell)) for cell in row] for row in table.rows]  # spelled before columns get a width
    cells = [[row[number] for row in rows if len(row) > 1] for number in range(len(table.columns))]
    if sum(max(map(len, column), default=0) + 1 for column in cells) > console.width:
        rows = [[_broken(row[0]), *row[1:]] if len(row) > 1 else row for row in rows]
        cells[0] = [row[0] for row in rows if len(row) > 1]
    # Specs and numbers are not folded before texts, nor is a first column of names.
    unbroken = [not any(" " in cell for cell in column) for column in cells]
    if cells and max(map(_width, cells[0]), default=0) <= NAME:
        unbroken[0] = True
    widest = [max(map(_width, column), default=0) for column in cells]
    widths = [wide if whole else 8 for wide, whole in zip(widest, unbroken, strict=True)]
    fits = sum(widths) + len(widths) <= console.width
    for number, column in enumerate(table.columns):
        shown.add_column(
            encodable(column),
            justify="left" if number < table.text_columns or _is_text(cells[number]) else "right",
            overflow="fold",
            no_wrap=fits and unbroken[number],
        )
    for row in rows:
        if len(row) == 1:
            shown.add_section()
        shown.add_row(*row)
    if table.title:
        print_text(table.title, wrap=True)
    console.print(shown, markup=markup)
    if table.caption:
        print_text(table.caption, wrap=True)


def _broken(name: str) -> str:
    """Break a name with a long word after blanks and commas: ``local 32,fragments=2,`` and ``overlap=12 ef|sign``."""
    if max(map(len, name.split()), default=0) <= LONG_WORD:
        return name
    lines = [""]
    for part in re.findall(r"[^\s,]*[\s,]*", name):
        if lines[-1] and len((lines[-1] + part).rstrip()) > NAME:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _width(cell: str) -> int:
    return max(map(len, cell.splitlines()), default=0)


def _is_text(cells: Sequence[str]) -> bool:
    """Return whether most of a column's cells begin with a letter: words are easier to read from the left."""
    return 2 * sum(cell[:1].isalpha() for cell in cells) > len(cells)


class _Description(ProgressColumn):
    """Shows what is being done, on one line in a narrow terminal, too."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="crop")


class _ShareAndTimeLeft(ProgressColumn):
    """Shows ``40 %, 0:01:20 left``, the parts of it that are known."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        left = task.time_remaining
        return Text(f"{task.percentage:.0f} %" + ("" if left is None else f", {timedelta(seconds=round(left))} left"))


@contextmanager
def loading() -> Iterator[None]:
    """Say on a terminal that torch is being loaded, which takes seconds the first time."""
    shown = sys.stderr.isatty() and "torch" not in sys.modules
    if shown:
        print("loading torch...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r" + " " * 16, end="\r", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(label: str) -> Iterator[tuple[Progress, TaskID]]:
    """Show progress and time left on stderr and remove it at the end; show nothing if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = [_Description(), *([BarColumn(bar_width=10)] if console.width >= 100 else []), _ShareAndTimeLeft()]
    bar = Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())
    with bar:
        yield bar, bar.add_task(label, total=None)


def examples(*lines: str) -> str:
    """Return the end of a help text. Tests run the lines."""
    return "\n\n".join(["Examples:", *(f"  $ {line}" for line in lines)])


def check_writable(path: Path) -> None:
    """Raise ``FileError`` if a file cannot be written, before minutes of work."""
    if path.is_dir():
        raise FileError(f"expected a file, {path} is a folder: name a file in it")
    folder = path.resolve().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise FileError(f"cannot write {path}: {folder} is not a writable folder")
