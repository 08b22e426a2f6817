"""``laconic demo``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.cli.output import examples, progress_bar, results, show_json, size

__all__ = ["EXAMPLES", "demo", "register"]

EXAMPLES = ("laconic demo --iterations 20",)

METHODS = ("1", "2", "3", "4", "5", "6", "adaptive", "laconic")


def demo(
    iterations: Annotated[int, typer.Option("--iterations", help="Of each method.")] = 200,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Keep the runs here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train on embedded digits with a server and two workers, by one method after the other, and compare.

    All three are processes of their own and talk over sockets.
    """
    from laconic.cluster.job import Job
    from laconic.train.methods import method_options
    from laconic.train.run import Config, launch

    with tempfile.TemporaryDirectory() as scratch, progress_bar("starting") as (bar, task):
        folder = run_dir or Path(scratch)
        runs = {}
        for method in METHODS:
            job = Job(**{"workers": 2, "lr": 0.05} | method_options(method))
            whole = -(-iterations // job.every) * job.every
            runs[folder / method] = Config(model="mlp", data="digits", iterations=whole, method=method, job=job)
        total = sum(config.iterations for config in runs.values())

        def tell(lines: list[dict[str, Any]]) -> None:
            done = sum(line["iteration"] for line in lines) / 2
            newest = Path(lines[-1]["run_dir"]).name
            bar.update(task, completed=done, total=total, description=f"method {newest}")

        summaries = launch(runs, tell=tell)
    if json:
        show_json({"runs": summaries})
    else:
        _print(summaries)


def _print(summaries: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from laconic.train.methods import METHODS as EXPLAINED

    table = Table("method", "what it does")
    for column in ("accuracy %", "bytes per iteration", "of method 1", "encode s", "waiting s", "total s"):
        table.add_column(column, justify="right")
    whole = summaries[0]["wire_bytes_per_iteration"]
    for summary in summaries:
        sent = summary["wire_bytes_per_iteration"]
        table.add_row(
            summary["method"],
            EXPLAINED[summary["method"]][0],
            f"{summary['accuracy']:.1f}",
            size(sent),
            f"1/{whole / sent:.0f}",
            *(f"{summary[key]:.2f}" for key in ("encode_s", "communication_s", "total_s")),
        )
    results().print(table, markup=False)


def register(app: typer.Typer) -> None:
    app.command("demo", epilog=examples(*EXAMPLES))(demo)
