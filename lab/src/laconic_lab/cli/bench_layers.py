"""``laconic bench layers``."""

from __future__ import annotations

from typing import Annotated

import typer

from laconic.cli.options import Json, RecordFile, option
from laconic.cli.output import examples
from laconic_lab.cli.results import measure_and_show

__all__ = ["EXAMPLES", "layers", "register"]

EXAMPLES = (
    "laconic bench layers mlp",
    "laconic bench layers 'linear 512-512' --scheme monarch:0.1 --repeat 5 --json",
)


def layers(
    cases: Annotated[list[str] | None, typer.Argument(metavar="WHAT", help="linear N-M, or an image model.")] = None,
    scheme: Annotated[list[str] | None, option("Instead of the case's own.", metavar="SCHEME:RHO")] = None,
    batch: Annotated[int | None, option("Instead of the case's own.")] = None,
    repeat: Annotated[int, option("Turns of each.", min=3)] = 9,
    threads: Annotated[int, option("Of torch.", min=1)] = 1, device: Annotated[str, option("cpu, cuda, …")] = "cpu",
    seed: Annotated[int, option("Of weights and inputs.")] = 0, record: RecordFile = None, json: Json = False,
) -> None:  # fmt: skip
    """Time steps of compressed layers and models beside dense ones, in turns.

    rho: trained parameters relative to the dense layer. h: step time relative
    to the dense layer, as processor time with one thread. On a busy machine
    h is left empty.
    """
    from laconic_lab.bench.layers import LayerSettings, layer_table, run_layers

    settings = LayerSettings(
        cases=tuple(cases or LayerSettings.cases), schemes=tuple(scheme or ()), batch=batch, repeat=repeat,
        threads=threads, device=device, seed=seed,
    )  # fmt: skip
    measure_and_show("layers", settings, run_layers, lambda records: [layer_table(records)], record, json)


def register(app: typer.Typer) -> None:
    app.command("layers", epilog=examples(*EXAMPLES))(layers)
