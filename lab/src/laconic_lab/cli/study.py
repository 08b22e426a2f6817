"""``laconic study``: runs the experiments of a study and prints its tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperOption

from laconic.cli.complete import one_of
from laconic.cli.help import HelpCommand
from laconic.cli.options import Json, option
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
    "laconic study gpt --models 1m --methods AdamW-DDP,laconic --iterations 60",
    "laconic study pipeline --methods none,thc:4 --iterations 20",
)

OUT_OF_TIME = 75
"""Exit code of a call that ends before all is done (EX_TEMPFAIL of sysexits.h)."""
REPORT, ALL = "report", "all"


class StudyCommand(HelpCommand):
    """Fills the help with what the studies declare: their experiments, and which options each of them takes."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        studies = [load_study(name) for name in study_names()]
        for parameter in self.params:
            if not isinstance(parameter, TyperOption):
                continue
            if parameter.name == "part":
                listed = "; ".join(f"{one.name}: {', '.join(one.experiments)}" for one in studies)
                parameter.help = f"{parameter.help} {listed}."
            users = [one.name for one in studies if parameter.name in one.flags]
            if users:
                parameter.rich_help_panel = f"Options of {', '.join(users)}"
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
        option(
            "Experiment to run, or all; may be repeated. report runs nothing and reads Records.",
            "the first",
            metavar="PART",
        ),
    ] = None,
    runs: Annotated[int | None, option("Runs of each setting.", "2; on a GPU the paper's", min=1)] = None,
    models: Annotated[
        str | None, option("Models to train, such as lenet5,vgg11.", "all of the study", metavar="LIST")
    ] = None,
    methods: Annotated[str | None, option("Methods, such as 1,5,laconic.", "all", metavar="LIST")] = None,
    seeds: Annotated[str | None, option("Seeds, such as 0,1,2.", "the experiment's", metavar="LIST")] = None,
    lanes: Annotated[int | None, option("Runs trained side by side.", "6 or 8 on a GPU, 1 on a CPU", min=1)] = None,
    links: Annotated[
        str | None,
        option("Links of the experiments times and runs: unshaped, 1gbit, 100mbit, …", "all", metavar="LIST"),
    ] = None,
    iterations: Annotated[int | None, option("times: iterations of each method, model and link.", "200", min=1)] = None,
    cell_seconds: Annotated[
        float | None, option("times: seconds after which 20 iterations are enough.", "150", min=1)
    ] = None,
    turns: Annotated[int | None, option("times: turns in which methods are measured.", "2", min=1)] = None,
    epochs: Annotated[int | None, option("Passes over the images.", "the study's", min=1)] = None,
    workers: Annotated[int | None, option("Workers with exclusive shares of the images.", "5", min=1)] = None,
    data: Annotated[
        str | None, option("Data set; digits is part of the package.", "digits, or the model's own")
    ] = None,
    data_dir: Annotated[Path | None, option("Folder of the data sets.", "$LACONIC_DATA", metavar="DIR")] = None,
    device: Annotated[str, option("auto, cpu or cuda.")] = "auto",
    lr: Annotated[float | None, option("Learning rate.", "0.8")] = None,
    decay: Annotated[float | None, option("Factor of the learning rate after each epoch.", "0.99")] = None,
    l1: Annotated[float | None, option("Weight of the l1 term.", "1.1e-05")] = None,
    batch: Annotated[int | None, option("Images of a mini-batch.", "100", min=1)] = None,
    seed: Annotated[int | None, option("Seed of all random numbers.", "0")] = None,
    minutes: Annotated[
        float | None,
        option("End after so many minutes with exit code 75; the same command continues.", "when all is done", min=0),
    ] = None,
    records: Annotated[
        Path | None, option("Keep Records here; work with a Record is not repeated.", metavar="DIR")
    ] = None,
    figures: Annotated[Path | None, option("Draw figures as SVG files here (needs matplotlib).", metavar="DIR")] = None,
    json: Json = False,
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
    from laconic_lab.studies.deadline import Deadline, OutOfTimeError  # not at the start of every command

    deadline = Deadline(minutes)
    if experiments != [REPORT]:
        deadline.require(records)
    arguments = chosen.options(given) | {"data_dir": data_dir, "device": device, "deadline": deadline}
    try:
        written = _records(chosen, experiments, arguments, records)
    except OutOfTimeError as error:
        print_stderr(f"laconic: {error}")
        raise typer.Exit(OUT_OF_TIME) from None
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
