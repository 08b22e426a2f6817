"""``laconic bench ddp``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.cli.output import check_writable, examples, print_json, print_stderr, progress_bar
from laconic_lab.cli.bench_cluster import print_table

__all__ = ["EXAMPLES", "ddp", "register"]

EXAMPLES = (
    "laconic bench ddp --quick",
    "laconic bench ddp qsgd:4 --quick --stock ddp --rates unshaped --json",
    "laconic bench ddp qsgd:4 'ef|thc:4' --rates 100mbit --stock ddp,fp16 --record ddp.jsonl",
)


def ddp(
    specs: Annotated[
        list[str] | None, typer.Argument(metavar="SPEC…", help="Codecs and channels.", show_default="several")
    ] = None,
    stock: Annotated[
        str | None,
        typer.Option(
            metavar="W,W,…", help="torch's exchanges to compare with; ddp is always included.", show_default="all"
        ),
    ] = None,
    rates: Annotated[
        str | None, typer.Option(metavar="R,R,…", help="Of links.", show_default="unshaped,1gbit,100mbit")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of single-threaded processes.", show_default="2")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model whose parameters are exchanged.", show_default="vgg11")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps that count.", show_default="9")] = None,
    slow_steps: Annotated[
        int | None, typer.Option(help="Timed steps where a step takes more than two seconds.", show_default="3")
    ] = None,
    limit_s: Annotated[
        float | None, typer.Option(help="A step that takes longer counts as hung.", show_default="60")
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Train the model with each exchange; 'local 10 SPEC' is local SGD.")
    ] = False,
    data: Annotated[str | None, typer.Option(help="To train with.", show_default="digits")] = None,
    epochs: Annotated[int | None, typer.Option(help="Of training.", show_default="2")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples per rank and step.", show_default="32")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="0.02")] = None,
    test_every: Annotated[int | None, typer.Option(help="Steps between tests.", show_default="100")] = None,
    paced: Annotated[
        bool, typer.Option("--paced", help="Emulate slow links by paced sockets, as always without root.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the gradients, or of the training.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A small model and few steps, for a quick look.")] = False,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE.jsonl", help="Write Records, one JSON object per line.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time steps of DistributedDataParallel: plain, with torch's hooks, and attached.

    Gradients are pre-generated, so that a step is its exchange. Steps of all
    exchanges alternate; the means are checked first. With root each rank is a
    host in its own network namespace, without root its sockets are paced;
    each link is measured before and after.
    """
    from laconic.records import write
    from laconic_lab.bench.ddp import DDPSettings, ddp_tables, run_ddp

    settings = DDPSettings().quick() if quick else DDPSettings()
    given: dict[str, Any] = {
        "specs": tuple(specs) if specs else None, "stock": _words(stock), "rates": _words(rates), "ranks": ranks,
        "model": model, "steps": steps, "slow_steps": slow_steps, "limit_s": limit_s, "train": train or None,
        "data": data, "epochs": epochs, "batch": batch, "lr": lr, "test_every": test_every,
        "paced": paced or None,
    }  # fmt: skip
    settings = replace(settings, seed=seed, **{key: value for key, value in given.items() if value is not None})
    if record is not None:
        check_writable(record)
    with progress_bar("ddp") as (bar, task):
        found = run_ddp(settings, tell=lambda what: bar.update(task, description=what))
    if record is not None:
        write(found, record)
        print_stderr(f"{len(found)} Records written to {record}")
    if json:
        print_json({"command": settings.command(), "records": [{"kind": one.kind, **one.values} for one in found]})
        return
    for table in ddp_tables(found):
        print_table(table)


def _words(text: str | None) -> tuple[str, ...] | None:
    words = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    return words or None


def register(app: typer.Typer) -> None:
    app.command("ddp", epilog=examples(*EXAMPLES))(ddp)
