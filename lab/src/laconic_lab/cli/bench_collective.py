"""``laconic bench collective``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.output import check_writable, examples, print_json, stdout_console
from laconic.units import show_bytes

__all__ = ["EXAMPLES", "collective", "register"]

EXAMPLES = (
    "laconic bench collective",
    "laconic bench collective thc:6 --numel 100000 --repeat 3 --json",
)


def collective(
    specs: Annotated[
        list[str] | None, typer.Argument(metavar="SPEC…", help="Summable codecs.", show_default="shared:8 thc:4")
    ] = None,
    numel: Annotated[int, typer.Option(help="Values of the tensor.")] = 25_000_000,
    ranks: Annotated[int, typer.Option(help="Number of single-threaded processes.")] = 2,
    repeat: Annotated[int, typer.Option(help="Rounds that count.")] = 9,
    seed: Annotated[int, typer.Option(help="Seed of the gradients.")] = 0,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE.jsonl", help="Write Records, one JSON object per line.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time means over processes of this host on gloo: fp32, bf16 and compressed.

    The rounds alternate, and a round lasts until the slowest rank has the
    mean. Loopback is about as fast as a 10 Gbit/s network; the gain on a
    slower one is larger.
    """
    from rich.table import Table

    from laconic.records import write
    from laconic_lab.bench.collective import CollectiveSettings, run_collective

    settings = CollectiveSettings(numel=numel, ranks=ranks, repeat=repeat, seed=seed)
    if specs:
        settings = CollectiveSettings(tuple(specs), numel, ranks, repeat, seed)
    if record is not None:
        check_writable(record)
    found = run_collective(settings)
    records = [each.record(settings, found[0]) for each in found]
    if record is not None:
        write(records, record)
    if json:
        print_json({"command": settings.command(), "results": [each.values for each in records]})
        return
    table = Table(title=f"{numel:,} values, {ranks} ranks")
    for column in ("mean by", "median", "best", "× fp32", "× fp32, best", "bytes a rank", "squared error"):
        table.add_column(column, justify="left" if column == "mean by" else "right")
    for each, made in zip(found, records, strict=True):
        table.add_row(
            each.name,
            f"{1e3 * each.median:.1f} ms",
            f"{1e3 * min(each.seconds):.1f} ms",
            f"{made.values['speedup_fp32']:.2f}",
            f"{made.values['speedup_fp32_best']:.2f}",
            show_bytes(each.nbytes),
            f"{each.error:.2g}",
        )
    stdout_console().print(table)


def register(app: typer.Typer) -> None:
    app.command(epilog=examples(*EXAMPLES))(collective)
