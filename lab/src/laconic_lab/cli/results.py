"""The common end of the benchmark commands: run, write Records, print them as JSON or tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.output import check_writable, print_json, print_stderr, print_table, progress_bar, stdout_console
from laconic.records import Record, write
from laconic.tables import Table

if TYPE_CHECKING:
    from laconic_lab.bench.cluster import ClusterTable

__all__ = ["given", "measure", "measure_and_show", "names", "print_records", "show_records", "write_records"]


def names(text: str | None) -> tuple[str, ...]:
    """Return the names in a list separated by commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given: neither None nor empty nor False."""
    return {name: value for name, value in options.items() if value not in (None, (), False)}


def measure(label: str, path: Path | None, run: Callable[[Callable[[str], None]], Sequence[Record]]) -> list[Record]:
    """Run a benchmark under a progress bar and write its Records, to a file that is checked first."""
    if path is not None:
        check_writable(path)
    with progress_bar(label) as (bar, task):
        records = list(run(lambda text: bar.update(task, description=text)))
    write_records(records, path)
    return records


def write_records(records: Sequence[Record], path: Path | None) -> None:
    if path is not None:
        write(records, path)
        print_stderr(f"{len(records)} Records written to {path}")


def print_records(records: Sequence[Record], command: str) -> None:
    """Print Records as one JSON object."""
    print_json({"command": command, "records": [{"kind": one.kind, **one.values} for one in records]})


def measure_and_show(
    label: str, settings: Any, run: Callable[..., Sequence[Record]],
    tables: Callable[[Sequence[Record]], Iterable[ClusterTable]], path: Path | None, json: bool,
) -> None:  # fmt: skip
    """Run a benchmark with its settings; print its Records as JSON, or as tables with their notes and goals."""
    show_records(measure(label, path, lambda notify: run(settings, tell=notify)), settings.command(), tables, json)


def show_records(
    records: Sequence[Record], command: str, tables: Callable[[Sequence[Record]], Iterable[ClusterTable]], json: bool
) -> None:
    """Print Records as JSON, or as tables with their notes and goals."""
    if json:
        print_records(records, command)
        return
    console = stdout_console()
    for table in tables(records):
        print_table(Table(table.columns, table.rows, table.words))
        console.print(table.notes, markup=False)
        for met, text in table.verdicts:
            console.print(text, style="green" if met else "red", markup=False)
        console.print()
