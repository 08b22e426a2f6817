"""``laconic study``: runs the experiments of a study and prints its tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from laconic.cli.complete import one_of
from laconic.cli.output import examples, print_json, print_stderr, print_table, progress_bar
from laconic.errors import ConfigError
from laconic_lab.studies import load_study, study_names

if TYPE_CHECKING:
    from laconic.records import Record
    from laconic_lab.studies.study import Results, Study

__all__ = ["EXAMPLES", "register", "study"]

EXAMPLES = (
    "laconic study oland2015 --runs 1 --epochs 2",
    "laconic study oland2015 --part collapse --runs 1 --epochs 2 --records runs/oland2015 --json",
    "laconic study oland2015 --part report --records results/oland2015",
    "laconic study kothari2021 --models lenet5 --methods 1,5,laconic --data digits --epochs 2",
    "laconic study jang2017 --part kernels --device cpu",
    "laconic study homomorphic --part products --models mlp --data digits --epochs 2 --seeds 0",
)

REPORT, ALL = "report", "all"


class StudyCommand(TyperCommand):
    """Fills the help with what the studies declare: their experiments, and which options each of them takes."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        studies = [load_study(name) for name in study_names()]
        for option in self.params:
            if not isinstance(option, TyperOption):
                continue
            if option.name == "part":
                listed = "; ".join(f"{one.name}: {', '.join(one.experiments)}" for one in studies)
                option.help = f"{option.help} {listed}."
            users = [one.name for one in studies if option.name in one.flags]
            if users:
                option.rich_help_panel = f"Options of {', '.join(users)}"
        super().format_help(ctx, formatter)


def study(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help=f"The study: {', '.join(study_names())}.", autocompletion=one_of(*study_names())
        ),
    ],
    part: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART",
            help="Experiment to run, or all; may be repeated. report runs nothing and reads Records.",
            show_default="the first",
        ),
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help="Runs of each setting.", min=1, show_default="2; on a GPU the paper's")
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Models to train, such as lenet5,vgg11.", show_default="all of the study"),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="LIST", help="Methods, such as 1,5,laconic.", show_default="all")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="LIST", help="Seeds, such as 0,1,2.", show_default="the experiment's")
    ] = None,
    lanes: Annotated[
        int | None,
        typer.Option(help="Runs trained side by side.", min=1, show_default="4 or 6 on a GPU, 1 on a CPU"),
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Links of the experiment times: unshaped, 1gbit, 100mbit (as root: by the lab).",
            show_default="all",
        ),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="times: iterations of each method, model and link.", min=1, show_default="200")
    ] = None,
    cell_seconds: Annotated[
        float | None,
        typer.Option(help="times: seconds after which 20 iterations are enough.", min=1, show_default="150"),
    ] = None,
    turns: Annotated[
        int | None, typer.Option(help="times: turns in which methods are measured.", min=1, show_default="2")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the images.", min=1, show_default="the study's"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Workers with exclusive shares of the images.", min=1, show_default="5")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Data set; digits is part of the package.", show_default="digits, or the model's own"),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the data sets.", show_default="$LACONIC_DATA")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="0.8")] = None,
    decay: Annotated[
        float | None, typer.Option(help="Factor of the learning rate after each epoch.", show_default="0.99")
    ] = None,
    l1: Annotated[float | None, typer.Option(help="Weight of the l1 term.", show_default="1.1e-05")] = None,
    batch: Annotated[int | None, typer.Option(help="Images of a mini-batch.", min=1, show_default="100")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.", show_default="0")] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep Records here; work with a Record is not repeated.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw figures as SVG files here (needs matplotlib).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the experiments of a paper again and compare its claims with what was found."""
    chosen = load_study(name)
    given = {
        "runs": runs, "models": models, "methods": methods, "seeds": seeds, "lanes": lanes, "links": links,
        "iterations": iterations, "cell_seconds": cell_seconds, "turns": turns, "epochs": epochs, "workers": workers,
        "data": data, "lr": lr, "decay": decay, "l1": l1, "batch": batch, "seed": seed,
    }  # fmt: skip
    foreign = [option for option, value in given.items() if value is not None and option not in chosen.flags]
    if foreign:
        raise ConfigError(f"--{foreign[0].replace('_', '-')} is no option of the study {name}")
    experiments = _experiments(part or [chosen.experiments[0]], chosen)
    arguments = chosen.options(given) | {"data_dir": data_dir, "device": device}
    written = _records(chosen, experiments, arguments, records)
    results = chosen.results(written)
    if figures is not None:
        for path in chosen.draw(results, figures):
            print_stderr(f"{path} written")
    if json:
        print_json(_json(chosen, written, results))
    else:
        for table in chosen.all_tables(results):
            print_table(table)


def _experiments(wanted: list[str], chosen: Study[Any]) -> list[str]:
    known = (*chosen.experiments, ALL, REPORT)
    for name in wanted:
        if name not in known:
            raise ConfigError(f"unknown part {name!r}: expected one of {', '.join(known)}")
    if REPORT in wanted and len(wanted) > 1:
        raise ConfigError("--part report runs nothing: give it alone")
    return list(chosen.experiments) if ALL in wanted else list(dict.fromkeys(wanted))


def _records(
    chosen: Study[Any], experiments: list[str], arguments: dict[str, Any], folder: Path | None
) -> list[Record]:
    """Run the experiments and return their Records, or read those of a folder for ``report``."""
    if experiments == [REPORT]:
        if folder is None:
            raise ConfigError("--part report reads Records: name their folder by --records")
        return chosen.records_in(folder)
    written: list[Record] = []
    with progress_bar("study") as (bar, task):
        for experiment in experiments:
            written += chosen.run(
                experiment,
                **arguments,
                records=folder,
                progress=lambda text, done, total: bar.update(task, description=text, completed=done, total=total),
            )
    return written


def _json(chosen: Study[Any], records: list[Record], results: Results) -> dict[str, Any]:
    from laconic.records import commit, machine, versions

    return {
        "records": len(records),
        **chosen.counts(records),
        "claims": [finding.values() for finding in chosen.findings(results)],
        "tables": [
            {"title": table.title, "columns": list(table.columns), "rows": [list(row) for row in table.rows]}
            for table in chosen.all_tables(results)
        ],
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }


def register(app: typer.Typer) -> None:
    app.command(cls=StudyCommand, epilog=examples(*EXAMPLES))(study)
