"""``laconic study``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.complete import one_of
from laconic.cli.output import examples, print_json, print_stderr, progress_bar, stdout_console
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from laconic.records import Record
    from laconic_lab.studies.tables import Table

__all__ = ["EXAMPLES", "register", "study"]

EXAMPLES = (
    "laconic study oland2015 --runs 1 --epochs 2",
    "laconic study oland2015 --part collapse --runs 1 --epochs 2 --records runs/oland2015 --json",
    "laconic study oland2015 --part report --records results/oland2015",
    "laconic study kothari2021 --models lenet5 --methods 1,5,laconic --data digits --epochs 2",
    "laconic study jang2017 --part kernels --device cpu",
    "laconic study homomorphic --part products --models mlp --data digits --epochs 2 --seeds 0",
)

STUDIES = ("oland2015", "kothari2021", "jang2017", "homomorphic")
REPORT = "report"
EVERYTHING = "all"


def study(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help=f"The study: {', '.join(STUDIES)}.", autocompletion=one_of(*STUDIES)),
    ],
    part: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART",
            help="oland2015: headline, fixed, grid, entropy, map, collapse, beyond, gradients. kothari2021: accuracy, "
            "ingredients, frontier, workers, resnet50, times. jang2017: table1, steps, kernels, runs. homomorphic: "
            "sums, layers, products, search, speed. Or all; may be repeated. report trains nothing and reads Records.",
            show_default="the first",
        ),
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help="Runs of each setting.", min=1, show_default="2; on a GPU the paper's")
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="kothari2021: lenet5, vgg11. homomorphic: mlp, lenet5, vgg11.", show_default="all"
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="LIST", help="kothari2021: such as 1,5,laconic.", show_default="all")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="kothari2021, homomorphic: such as 0,1,2.", show_default="the part's"),
    ] = None,
    lanes: Annotated[
        int | None,
        typer.Option(help="Not oland2015: runs side by side.", min=1, show_default="4 or 6 on a GPU, 1 on a CPU"),
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="kothari2021 times: unshaped, 1gbit, 100mbit (root: by the lab).", show_default="all"
        ),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="kothari2021 times: of each method, model and link.", min=1, show_default="200")
    ] = None,
    cell_seconds: Annotated[
        float | None,
        typer.Option(help="kothari2021 times: after which 20 iterations are enough.", min=1, show_default="150"),
    ] = None,
    turns: Annotated[
        int | None, typer.Option(help="kothari2021 times: in which methods are measured.", min=1, show_default="2")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the images.", min=1, show_default="100, 10 for gradients; 20 and 30"),
    ] = None,
    workers: Annotated[int, typer.Option(help="Workers with exclusive shares of the images.", min=1)] = 5,
    data: Annotated[
        str | None,
        typer.Option(help="digits, which come with the package, or mnist.", show_default="digits; mnist and cifar10"),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the files of data sets lie.", show_default="$LACONIC_DATA")
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
    """Run a paper's experiments again, and say which of its claims hold; or ours.

    Options that name a study are that study's alone; --runs, --workers and the hyper-parameters are oland2015's.
    """
    if name not in STUDIES:
        raise ConfigError(f"unknown study {name!r}: there is {', '.join(STUDIES)}")
    study_of, this = import_module(f"laconic_lab.studies.{name}"), BY_NAME[name]
    chosen = _parts(part or [study_of.PARTS[0]], study_of.PARTS)
    given = {
        "runs": runs, "models": models, "methods": methods, "seeds": seeds, "lanes": lanes, "links": links,
        "iterations": iterations, "cell_seconds": cell_seconds, "turns": turns, "epochs": epochs, "workers": workers,
        "data": data, "lr": lr, "decay": decay, "l1": l1, "batch": batch, "seed": seed,
    }  # fmt: skip
    options = this.options(study_of, given) | {"data_dir": data_dir, "device": device}
    found = _run(study_of, chosen, options, records)
    all_results = study_of.Results(found)
    drawn = study_of.draw(all_results, figures) if figures is not None else []
    for path in drawn:
        print_stderr(f"{path} written")
    tables = study_of.tables(all_results)
    if json:
        claims = [finding.values() for finding in study_of.findings(all_results)]
        print_json(_json(found, tables, claims, this.counts(found)))
    else:
        for table in tables:
            _print(table)


# ---------------------------------------------------------------------------------------------------------- studies

Given = Mapping[str, Any]
"""The command's options by name."""


@dataclass(frozen=True)
class _Study:
    """What is peculiar to one of ``laconic_lab.studies``.

    Args:
        options: What its ``run`` takes beside a part, of what was given.
        counts: What its Records count, for ``--json``.
    """

    options: Callable[[Any, Given], dict[str, Any]]
    counts: Callable[[list[Record]], dict[str, Any]]


def _of_oland2015(study_of: Any, given: Given) -> dict[str, Any]:
    """Up to eight runs on a CPU exchange real frames; others are one computation, and frames are compared by sample."""
    hyper = {name: given[name] for name in ("lr", "decay", "l1", "batch") if given[name] is not None}
    default = study_of.Setting(**hyper)
    taken = {name: given[name] for name in ("runs", "epochs", "workers", "seed")}
    return {**taken, "data": given["data"] or "digits", "default": default}


def _of_jang2017(study_of: Any, given: Given) -> dict[str, Any]:
    return {"data": given["data"] or "digits"}


def _of_homomorphic(study_of: Any, given: Given) -> dict[str, Any]:
    taken = {name: given[name] for name in ("epochs", "data", "lanes")}
    models = given["models"]
    return {
        **taken,
        "models": models.split(",") if models else tuple(study_of.HYPER),
        "seeds": _seeds(given["seeds"]),
    }


def _of_kothari2021(study_of: Any, given: Given) -> dict[str, Any]:
    links, methods = given["links"], given["methods"]
    timing = {"links": links and links.split(","), **{name: given[name] for name in TIMING}}
    return {
        **_of_homomorphic(study_of, given),
        "methods": methods.split(",") if methods else None,
        "timing": study_of.Plan(**{name: value for name, value in timing.items() if value is not None}),
    }


def _packets(found: list[Record]) -> dict[str, Any]:
    """What the ways of oland2015 compared."""
    differ = sum(r.values["packets_other_values"] + r.values["packets_other_sizes"] for r in found)
    return {"runs": sum(r.values["runs"] for r in found), "packets_that_differ": differ}


def _compared(found: list[Record]) -> dict[str, Any]:
    """Frames that were made beside what was computed."""
    compared = sum(record.values.get("frames_compared", 0) for record in found)
    differ = sum(record.values.get("frames_other", 0) for record in found)
    return {"runs": len(found), "frames_compared": compared, "frames_that_differ": differ}


TIMING = ("iterations", "cell_seconds", "turns")
BY_NAME = {
    "oland2015": _Study(_of_oland2015, _packets),
    "kothari2021": _Study(_of_kothari2021, _compared),
    "jang2017": _Study(_of_jang2017, lambda found: {"runs": len(found)}),
    "homomorphic": _Study(_of_homomorphic, _compared),
}


def _run(study_of: Any, chosen: list[str], options: dict[str, Any], records: Path | None) -> list[Record]:
    """The Records of these parts; or those that are kept, where nothing is to be run."""
    found: list[Record] = _kept(study_of, chosen, records)
    with progress_bar("study") as (bar, task):
        for one in chosen:
            if one != REPORT:
                found += study_of.run(
                    one,
                    **options,
                    records=records,
                    progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
                )
    return found


def _seeds(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(one) for one in text.split(",")]
    except ValueError:
        raise ConfigError(f"seeds are whole numbers, such as 0,1,2; got {text!r}") from None


def _parts(wanted: list[str], parts: tuple[str, ...]) -> list[str]:
    known = (*parts, EVERYTHING, REPORT)
    for one in wanted:
        if one not in known:
            raise ConfigError(f"unknown part {one!r}: expected one of {', '.join(known)}")
    if REPORT in wanted and len(wanted) > 1:
        raise ConfigError("--part report trains nothing: give it alone")
    return list(parts) if EVERYTHING in wanted else list(dict.fromkeys(wanted))


def _kept(study_of: Any, chosen: list[str], records: Path | None) -> list[Record]:
    if chosen != [REPORT]:
        return []
    if records is None:
        raise ConfigError("--part report reads Records: name their folder by --records")
    found: list[Record] = study_of.load(records)
    return found


def _json(
    found: list[Record], tables: list[Table], claims: list[dict[str, Any]], extra: dict[str, Any]
) -> dict[str, Any]:
    from laconic.records import commit, machine, versions

    return {
        "records": len(found),
        **extra,
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
    stdout_console().print(shown, markup=False)


def register(app: typer.Typer) -> None:
    app.command(epilog=examples(*EXAMPLES))(study)
