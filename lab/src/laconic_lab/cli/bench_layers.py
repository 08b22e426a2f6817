"""``laconic bench layers``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.output import check_writable, examples, print_json, print_stderr, progress_bar

__all__ = ["EXAMPLES", "layers", "register"]

EXAMPLES = (
    "laconic bench layers mlp",
    "laconic bench layers 'linear 512-512' --scheme monarch:0.1 --repeat 5 --json",
)


def layers(
    cases: Annotated[list[str] | None, typer.Argument(metavar="WHAT", help="linear N-M, or an image model.")] = None,
    scheme: Annotated[
        list[str] | None, typer.Option("--scheme", metavar="SCHEME:RHO", help="Instead of the case's own.")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Instead of the case's own.")] = None,
    repeat: Annotated[int, typer.Option("--repeat", help="Turns of each.", min=3)] = 9,
    threads: Annotated[int, typer.Option("--threads", help="Of torch.", min=1)] = 1,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, …")] = "cpu",
    seed: Annotated[int, typer.Option("--seed", help="Of weights and inputs.")] = 0,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE.jsonl", help="Write Records, one JSON object per line.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time steps of compressed layers and models beside dense ones, in turns.

    rho: trained parameters relative to the dense layer. h: step time relative
    to the dense layer, as processor time with one thread. On a busy machine
    h is left empty.
    """
    from laconic.records import write
    from laconic_lab.bench.layers import LayerSettings, layer_table, run_layers

    settings = LayerSettings(
        cases=tuple(cases or LayerSettings.cases), schemes=tuple(scheme or ()), batch=batch, repeat=repeat,
        threads=threads, device=device, seed=seed,
    )  # fmt: skip
    if record is not None:
        check_writable(record)
    with progress_bar("layers") as (bar, task):
        found = run_layers(settings, tell=lambda what: bar.update(task, description=what))
    if record is not None:
        write(found, record)
        print_stderr(f"{len(found)} Records written to {record}")
    if json:
        print_json({"command": settings.command(), "records": [{"kind": r.kind, **r.values} for r in found]})
        return
    from laconic_lab.cli.bench_cluster import print_table

    print_table(layer_table(found))


def register(app: typer.Typer) -> None:
    app.command("layers", epilog=examples(*EXAMPLES))(layers)
