"""``laconic demo``."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.options import Json, RecordFile, option
from laconic.cli.output import (
    check_writable,
    examples,
    loading,
    print_json,
    print_stderr,
    print_table,
    print_text,
    progress_bar,
    stdout_console,
)
from laconic.cli.progress import progress_line
from laconic.cli.roles import check_grpc
from laconic.errors import ConfigError
from laconic.tables import Table

if TYPE_CHECKING:
    from laconic.records import Record
    from laconic.train.run import Config

__all__ = ["EXAMPLES", "demo", "register"]

EXAMPLES = (
    "laconic demo",
    "laconic demo --methods 1,5 --iterations 20 --html quick.html --record quick.jsonl",
)

ITERATIONS = 200
PAGE = "demo.html"
FULL_TABLE_WIDTH = 120
"""Columns of a terminal that the whole table needs; in a narrower one the descriptions follow below the table."""


def demo(
    iterations: Annotated[int, option("Iterations of each method.")] = ITERATIONS,
    methods: Annotated[str | None, option("Methods, in this order.", "all but 2w", metavar="M,M,…")] = None,
    run_dir: Annotated[Path | None, option("Keep the runs here.", metavar="DIR")] = None,
    html: Annotated[
        Path | None, option("The report of all runs.", f"{PAGE}, in --run-dir if given", metavar="FILE")
    ] = None,
    record: RecordFile = None,
    json: Json = False,
) -> None:
    """Train on embedded digits with a server and two workers, one method after the other, and compare.

    Server and workers are three processes that communicate over sockets. The
    command prints a table and writes the report of all runs as one HTML file.
    """
    with loading():
        from laconic.records import write
        from laconic.report import build, write_page
        from laconic.train.demo import demo_config, demo_records, page_records
        from laconic.train.launch import launch

    html = html or (run_dir or Path()) / PAGE
    for path in (html, record):
        if path is not None:
            check_writable(path)
    check_grpc()
    chosen = _methods(methods)
    command = _command(iterations, chosen)
    with tempfile.TemporaryDirectory() as scratch, progress_bar("starting") as (bar, task):
        runs = {(run_dir or Path(scratch)) / method: demo_config(method, iterations) for method in chosen}
        progress = _Progress(runs)

        def show(reports: list[dict[str, Any]]) -> None:
            for line in progress.finished(reports):
                bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            bar.update(task, completed=progress.done, total=progress.total, description=progress.line)

        summaries = launch(runs, on_reports=show, on_start=lambda awaited: bar.update(task, description=awaited))
        records = demo_records(summaries, command)
        report = build(page_records(records, runs), title="laconic demo", command=command)
    if record is not None:
        write(records, record)
        print_stderr(f"{len(records)} records written to {record}")
    write_page(report.html, html)
    if json:
        print_json({"runs": summaries, "html": str(html)})
    else:
        _print(records)
        print_text(f"wrote {html}: open it in a browser")


def _methods(text: str | None) -> list[str]:
    from laconic.train.demo import DEMO_METHODS
    from laconic.train.methods import method_options

    if text is None:
        return list(DEMO_METHODS)
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError("--methods takes names separated by commas, such as 1,5,laconic; got none")
    for name in names:
        method_options(name)  # raises an error that lists the methods
    return names


def _command(iterations: int, methods: Sequence[str]) -> str:
    from laconic.train.demo import DEMO_METHODS

    words = ["laconic", "demo"]
    if tuple(methods) != DEMO_METHODS:
        words += ["--methods", ",".join(methods)]
    if iterations != ITERATIONS:
        words += ["--iterations", str(iterations)]
    return shlex.join(words)


class _Progress:
    """Progress of a series of runs."""

    def __init__(self, runs: dict[Path, Config]) -> None:
        self.total = sum(config.iterations for config in runs.values())
        self.done, self.line = 0, "starting"
        self._methods = {str(run_dir): config.method for run_dir, config in runs.items()}
        self._finished: set[str] = set()

    def finished(self, reports: list[dict[str, Any]]) -> list[str]:
        """Take over the newest reports; return a line for each run that has ended since the last call."""
        by_run: dict[str, list[dict[str, Any]]] = {}
        for report in reports:
            by_run.setdefault(report["run_dir"], []).append(report)
        self.done = sum(min(report["iteration"] for report in group) for group in by_run.values())
        *ended, current = sorted(by_run, key=list(self._methods).index)
        new = [run_dir for run_dir in ended if run_dir not in self._finished]
        self._finished.update(new)
        self.line = self._describe(current, by_run)
        return [self._describe(run_dir, by_run) for run_dir in new]

    def _describe(self, run_dir: str, by_run: dict[str, list[dict[str, Any]]]) -> str:
        return f"method {self._methods[run_dir]}: {progress_line(by_run[run_dir])}"


def _print(records: list[Record]) -> None:
    from laconic.report import NOTES, WORDS, compare

    table = compare(records)
    narrow = stdout_console().width < FULL_TABLE_WIDTH
    hidden = [table.columns.index(name) for name in (WORDS, "MB saved") if narrow and name in table.columns]
    shown = [number for number in range(len(table.columns)) if number not in hidden]
    print_table(
        Table(
            [table.columns[i] if i < table.text_columns else "\n".join(table.columns[i].rsplit(" ", 1)) for i in shown],
            [[row[i] for i in shown] for row in table.rows],
            text_columns=sum(i < table.text_columns for i in shown),
        )
    )
    if narrow and WORDS in table.columns:
        print_text(*(f"{row[0]}: {row[table.columns.index(WORDS)]}" for row in table.rows), "", wrap=True)
    print_text(NOTES, wrap=True)


def register(app: typer.Typer) -> None:
    app.command("demo", epilog=examples(*EXAMPLES))(demo)
