"""``laconic study``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.output import examples, progress_bar, results, say, show_json
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from laconic.records import Record
    from laconic.studies.oland2015.report import Table

__all__ = ["EXAMPLES", "register", "study"]

EXAMPLES = (
    "laconic study oland2015 --runs 1 --epochs 2",
    "laconic study oland2015 --part collapse --runs 1 --epochs 2 --records runs/oland2015 --json",
)

STUDIES = ("oland2015",)
REPORT = "report"
EVERYTHING = "all"


def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"The paper: {', '.join(STUDIES)}.")],
    part: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART",
            help="headline, fixed, grid, entropy, map, collapse, beyond, gradients, or all; may be repeated. "
            "report trains nothing and reads Records.",
            show_default="headline",
        ),
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help="Runs of each setting.", min=1, show_default="2; on a GPU the paper's")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the images.", min=1, show_default="100; 10 for gradients")
    ] = None,
    workers: Annotated[int, typer.Option(help="Workers with exclusive shares of the images.", min=1)] = 5,
    data: Annotated[str, typer.Option(help="digits, which come with the package, or mnist.")] = "digits",
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the files of mnist lie.", show_default="$LACONIC_DATA")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="0.8")] = None,
    decay: Annotated[float | None, typer.Option(help="What an epoch multiplies it with.", show_default="0.99")] = None,
    l1: Annotated[float | None, typer.Option(help="Weight of the l1 term.", show_default="1.1e-05")] = None,
    batch: Annotated[int | None, typer.Option(help="Images of a mini-batch.", min=1, show_default="100")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    records: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep Records here; what is there is not trained again.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw figures as SVG files here (needs matplotlib).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a paper's experiments again, and say which of its claims hold.

    Up to eight runs on a CPU exchange real frames. With more, or on a GPU, all runs are one computation, and frames
    are compared with it by sample.
    """
    from laconic.studies import oland2015

    if name not in STUDIES:
        raise ConfigError(f"unknown study {name!r}: there is {', '.join(STUDIES)}")
    chosen = _parts(part or ["headline"])
    hyper = {"lr": lr, "decay": decay, "l1": l1, "batch": batch}
    default = oland2015.Setting(**{key: value for key, value in hyper.items() if value is not None})  # type: ignore[arg-type]
    found: list[Record] = []
    if chosen == [REPORT]:
        if records is None:
            raise ConfigError("--part report reads Records: name their folder by --records")
        found = oland2015.load(records)
    with progress_bar("study") as (bar, task):
        for one in chosen:
            if one != REPORT:
                found += oland2015.run(
                    one,
                    runs=runs,
                    epochs=epochs,
                    workers=workers,
                    data=data,
                    data_dir=data_dir,
                    device=device,
                    seed=seed,
                    default=default,
                    records=records,
                    progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
                )
    all_results = oland2015.Results(found)
    drawn = oland2015.draw(all_results, figures) if figures is not None else []
    for path in drawn:
        say(f"{path} written")
    tables = oland2015.tables(all_results)
    if json:
        show_json(_json(found, tables, [finding.values() for finding in oland2015.findings(all_results)]))
    else:
        for table in tables:
            _print(table)


def _parts(wanted: list[str]) -> list[str]:
    from laconic.studies.oland2015 import PARTS

    known = (*PARTS, EVERYTHING, REPORT)
    for one in wanted:
        if one not in known:
            raise ConfigError(f"unknown part {one!r}: expected one of {', '.join(known)}")
    if REPORT in wanted and len(wanted) > 1:
        raise ConfigError("--part report trains nothing: give it alone")
    return list(PARTS) if EVERYTHING in wanted else list(dict.fromkeys(wanted))


def _json(found: list[Record], tables: list[Table], claims: list[dict[str, Any]]) -> dict[str, Any]:
    from laconic.records import commit, machine, versions

    return {
        "records": len(found),
        "runs": sum(record.values["runs"] for record in found),
        "packets_that_differ": sum(
            record.values["packets_other_values"] + record.values["packets_other_sizes"] for record in found
        ),
        "claims": claims,
        "tables": [
            {"title": table.title, "columns": list(table.columns), "rows": [list(row) for row in table.rows]}
            for table in tables
        ],
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }


def _print(table: Table) -> None:
    import rich.box
    from rich.table import Table as Rich

    shown = Rich(title=table.title, title_justify="left", box=rich.box.SIMPLE, pad_edge=False)
    for column in table.columns:
        shown.add_column(column, overflow="fold")
    for row in table.rows:
        shown.add_row(*row)
    results().print(shown, markup=False)


def register(app: typer.Typer) -> None:
    app.command(epilog=examples(*EXAMPLES))(study)
