"""Where text goes: results on stdout, everything else on stderr. With ``--json`` stdout is one JSON object."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from laconic.errors import FileError
from laconic.watch.terminal import size

__all__ = ["check_writable", "examples", "progress_bar", "results", "say", "show_json", "size"]

PIPED_WIDTH = 160
"""Columns when nobody's terminal says how many: tables in a file or a log must not be folded to 80."""


def results() -> Console:
    """The console of stdout."""
    piped = not sys.stdout.isatty()
    return Console(width=PIPED_WIDTH if piped else None, highlight=False, soft_wrap=False)


def say(message: str) -> None:
    """One line on stderr, as it is: no markup, no folding."""
    print(message.replace("\n", " "), file=sys.stderr)


def show_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2))


@contextmanager
def progress_bar(label: str) -> Iterator[tuple[Progress, TaskID]]:
    """A bar on stderr that leaves nothing behind; silent where stderr is no terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        yield bar, bar.add_task(label, total=None)


def examples(*lines: str) -> str:
    """The end of a help text. The lines are run by tests."""
    return "\n\n".join(["Examples:", *(f"  $ {line}" for line in lines)])


def check_writable(path: Path) -> None:
    """A file for records; said before minutes of work, not after."""
    if path.is_dir():
        raise FileError(f"expected a file for records, {path} is a folder: name a file in it")
    folder = path.resolve().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise FileError(f"cannot write records to {path}: {folder} is no folder that can be written to")
