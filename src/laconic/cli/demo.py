"""``laconic demo``."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.output import examples, print_json, print_stderr, print_table, print_text, progress_bar, stdout_console
from laconic.cli.progress import status
from laconic.cli.roles import check_grpc
from laconic.errors import ConfigError, FileError
from laconic.tables import Table

if TYPE_CHECKING:
    from laconic.records import Record
    from laconic.train.run import Config

__all__ = ["EXAMPLES", "demo", "register"]

EXAMPLES = (
    "laconic demo",
    "laconic demo --methods 1,5 --iterations 20 --html quick.html --record quick.jsonl",
)

METHODS = ("1", "2", "3", "4", "5", "6", "adaptive", "laconic")
WORKERS = 2
ITERATIONS = 200
PAGE = "demo.html"

WIDE = 120
"""Columns that the whole table needs; in fewer, what methods do is said below it."""


def demo(
    iterations: Annotated[int, typer.Option("--iterations", help="Of each method.")] = ITERATIONS,
    methods: Annotated[str, typer.Option("--methods", metavar="M,M,…", help="Which, in this order.")] = ",".join(
        METHODS
    ),
    run_dir: Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="Keep the runs here.")] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Their report, as of laconic report.",
            show_default=f"{PAGE}, in --run-dir if given",
        ),
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE.jsonl", help="Write Records, one JSON object a line.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train on embedded digits with a server and two workers, by one method after the other, and compare.

    All three are processes of their own and talk over sockets. Ends with a
    table, and writes the report of all runs as one HTML file.
    """
    from laconic.records import write
    from laconic.report import build, write_page
    from laconic.train.launch import launch

    html = html or (run_dir or Path()) / PAGE
    for path in (html, record):
        if path is not None:
            _check_writable(path)
    check_grpc()
    chosen = _methods(methods)
    with tempfile.TemporaryDirectory() as scratch, progress_bar("starting") as (bar, task):
        runs = {(run_dir or Path(scratch)) / method: _config(method, iterations) for method in chosen}
        progress = _Progress(runs)

        def tell(lines: list[dict[str, Any]]) -> None:
            for line in progress.finished(lines):
                bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            bar.update(task, completed=progress.done, total=progress.total, description=progress.line)

        summaries = launch(runs, tell=tell)
        tracks = _tracks(runs)
    records = _records(summaries, _command(iterations, chosen))
    if record is not None:
        write(records, record)
        print_stderr(f"{len(records)} records written to {record}")
    shown = [*_named(records, tracks), *(one for one in tracks if one.kind != "train.run")]
    write_page(build(shown, title="laconic demo", command=_command(iterations, chosen)).html, html)
    if json:
        print_json({"runs": summaries, "html": str(html)})
    else:
        _print(records)
        stdout_console().print(f"wrote {html}: open it in a browser", markup=False, soft_wrap=True)


def _methods(wanted: str) -> list[str]:
    from laconic.train.methods import method_options

    names = list(dict.fromkeys(name.strip() for name in wanted.split(",") if name.strip()))
    if not names:
        raise ConfigError("--methods takes names with commas between them, such as 1,5,laconic; got none")
    for name in names:
        method_options(name)  # says which there are
    return names


def _config(method: str, iterations: int) -> Config:
    from laconic.cluster.job import Job
    from laconic.train.methods import method_options
    from laconic.train.run import Config

    if iterations < 1:
        raise ConfigError(f"expected at least one iteration, got {iterations}")
    job = Job(**{"workers": WORKERS, "lr": 0.05} | method_options(method))
    whole = -(-iterations // job.every) * job.every
    return Config(model="mlp", data="digits", iterations=whole, method=method, job=job)


def _command(iterations: int, methods: Sequence[str]) -> str:
    words = ["laconic", "demo"]
    if tuple(methods) != METHODS:
        words += ["--methods", ",".join(methods)]
    if iterations != ITERATIONS:
        words += ["--iterations", str(iterations)]
    return shlex.join(words)


def _check_writable(path: Path) -> None:
    """Said before a minute of work, not after."""
    if path.is_dir():
        raise FileError(f"expected a file, {path} is a folder: name a file in it")
    folder = path.resolve().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise FileError(f"cannot write {path}: {folder} is no folder that can be written to")


class _Progress:
    """Where a series of runs is, from the workers' newest lines about each."""

    def __init__(self, runs: dict[Path, Config]) -> None:
        self.total = sum(config.iterations for config in runs.values())
        self.done, self.line = 0.0, "starting"
        self._names = {str(run_dir): config.method for run_dir, config in runs.items()}
        self._told: set[str] = set()
        self._raw: float | None = None

    def finished(self, lines: list[dict[str, Any]]) -> list[str]:
        """Take in the newest lines; one for people about each run that has ended since."""
        self.done = sum(line["iteration"] for line in lines) / WORKERS
        by_run: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            by_run.setdefault(line["run_dir"], []).append(line)
        *before, newest = sorted(by_run, key=list(self._names).index)
        ended = []
        for run_dir in before:
            if run_dir not in self._told:
                self._told.add(run_dir)
                ended.append(f"method {self._names[run_dir]}: {status(by_run[run_dir], raw_nbytes=self._raw)}")
                if self._raw is None and self._names[run_dir] == "1":  # sends all there is: others save that much
                    self._raw = _per_iteration(by_run[run_dir])
        self.line = f"method {self._names[newest]}: {status(by_run[newest], raw_nbytes=self._raw)}"
        return ended


def _per_iteration(lines: list[dict[str, Any]]) -> float:
    """Bytes of a worker."""
    sent = sum(line["bytes_sent"] + line["bytes_received"] for line in lines)
    return float(sent / sum(line["iteration"] for line in lines))


def _records(summaries: list[dict[str, Any]], command: str) -> list[Record]:
    from laconic.records import Record
    from laconic.train.methods import METHODS as EXPLAINED

    return [
        Record("demo.method", summary | {"what": EXPLAINED[summary["method"]][0], "command": command})
        for summary in summaries
    ]


def _tracks(runs: dict[Path, Config]) -> list[Record]:
    """What runs kept for reports, by method."""
    from laconic.records import read
    from laconic.train.run import RECORDS

    found = []
    for run_dir, config in runs.items():
        if (run_dir / RECORDS).exists():
            found += [replace(one, values={**one.values, "run": config.method}) for one in read(run_dir / RECORDS)]
    return found


def _named(records: list[Record], tracks: list[Record]) -> list[Record]:
    """Runs for the page: what methods do, and what their folders know beside it."""
    whole = {one.values["run"]: one.values for one in tracks if one.kind == "train.run"}
    return [
        replace(one, values={**whole.get(one.values["method"], {}), **one.values, "run": one.values["method"]})
        for one in records
    ]


def _print(records: list[Record]) -> None:
    from laconic.report import NOTES, WORDS, compare

    table = compare(records)
    narrow = stdout_console().width < WIDE
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
        print_text(*(f"{row[0]}: {row[table.columns.index(WORDS)]}" for row in table.rows), "")
    print_text(NOTES)


def register(app: typer.Typer) -> None:
    app.command("demo", epilog=examples(*EXAMPLES))(demo)
