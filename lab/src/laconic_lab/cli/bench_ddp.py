"""``laconic bench ddp``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from laconic.cli.options import Json, RecordFile, option
from laconic.cli.output import examples
from laconic_lab.cli.options import PacedSockets
from laconic_lab.cli.results import given, measure_and_show, names

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
        str | None, option("torch's exchanges to compare with; ddp is always included.", "all", metavar="W,W,…")
    ] = None,
    rates: Annotated[str | None, option("Of links.", "unshaped,1gbit,100mbit", metavar="R,R,…")] = None,
    ranks: Annotated[int | None, option("Number of single-threaded processes.", "2")] = None,
    model: Annotated[str | None, option("Model whose parameters are exchanged.", "vgg11")] = None,
    steps: Annotated[int | None, option("Steps that count.", "9")] = None,
    slow_steps: Annotated[int | None, option("Timed steps where a step takes more than two seconds.", "3")] = None,
    limit_s: Annotated[float | None, option("A step that takes longer counts as hung.", "60")] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Train the model with each exchange; 'local 10 SPEC' is local SGD.")
    ] = False,
    data: Annotated[str | None, option("To train with.", "digits")] = None,
    epochs: Annotated[int | None, option("Of training.", "2")] = None,
    batch: Annotated[int | None, option("Examples per rank and step.", "32")] = None,
    lr: Annotated[float | None, option("Learning rate.", "0.02")] = None,
    test_every: Annotated[int | None, option("Steps between tests.", "100")] = None,
    paced: PacedSockets = False,
    seed: Annotated[int, option("Seed of the gradients, or of the training.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A small model and few steps, for a quick look.")] = False,
    record: RecordFile = None,
    json: Json = False,
) -> None:
    """Time steps of DistributedDataParallel: plain, with torch's hooks, and attached.

    Gradients are pre-generated, so that a step is its exchange. Steps of all
    exchanges alternate; the means are checked first. With root each rank is a
    host in its own network namespace, without root its sockets are paced;
    each link is measured before and after.
    """
    from laconic_lab.bench.ddp import DDPSettings, ddp_tables, run_ddp

    settings = DDPSettings().quick() if quick else DDPSettings()
    chosen = given(
        specs=tuple(specs or ()), stock=names(stock), rates=names(rates), ranks=ranks, model=model, steps=steps,
        slow_steps=slow_steps, limit_s=limit_s, train=train, data=data, epochs=epochs, batch=batch, lr=lr,
        test_every=test_every, paced=paced,
    )  # fmt: skip
    settings = replace(settings, seed=seed, **chosen)
    measure_and_show("ddp", settings, run_ddp, ddp_tables, record, json)


def register(app: typer.Typer) -> None:
    app.command("ddp", epilog=examples(*EXAMPLES))(ddp)
