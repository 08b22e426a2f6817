"""``laconic bench collective``."""

from __future__ import annotations

from typing import Annotated

import typer

from laconic.cli.options import Json, RecordFile, option
from laconic.cli.output import check_writable, examples, print_json, print_table
from laconic.tables import Table
from laconic.units import show_bytes
from laconic_lab.cli.results import write_records

__all__ = ["EXAMPLES", "collective", "register"]

EXAMPLES = ("laconic bench collective", "laconic bench collective thc:6 --numel 100000 --repeat 3 --json")


def collective(
    specs: Annotated[
        list[str] | None, typer.Argument(metavar="SPEC…", help="Summable codecs.", show_default="shared:8 thc:4")
    ] = None,
    numel: Annotated[int, option("Values of the tensor.")] = 25_000_000,
    ranks: Annotated[int, option("Number of single-threaded processes.")] = 2,
    repeat: Annotated[int, option("Rounds that count.")] = 9,
    seed: Annotated[int, option("Seed of the gradients.")] = 0,
    record: RecordFile = None,
    json: Json = False,
) -> None:
    """Time means over processes of this host on gloo: fp32, bf16 and compressed.

    The rounds alternate, and a round lasts until the slowest rank has the
    mean. Loopback is about as fast as a 10 Gbit/s network; the gain on a
    slower one is larger.
    """
    from laconic_lab.bench.collective import CollectiveSettings, run_collective

    settings = CollectiveSettings(tuple(specs or CollectiveSettings.specs), numel, ranks, repeat, seed)
    if record is not None:
        check_writable(record)
    results = run_collective(settings)
    records = [result.record(settings, results[0]) for result in results]
    write_records(records, record)
    if json:
        print_json({"command": settings.command(), "results": [made.values for made in records]})
        return
    rows = [
        (
            result.name, f"{1e3 * result.median:.1f} ms", f"{1e3 * min(result.seconds):.1f} ms",
            f"{made.values['speedup_fp32']:.2f}", f"{made.values['speedup_fp32_best']:.2f}", show_bytes(result.nbytes),
            f"{result.error:.2g}",
        )
        for result, made in zip(results, records, strict=True)
    ]  # fmt: skip
    columns = ("mean by", "median", "best", "× fp32", "× fp32, best", "bytes a rank", "squared error")
    print_table(Table(columns, rows, title=f"{numel:,} values, {ranks} ranks"))


def register(app: typer.Typer) -> None:
    app.command(epilog=examples(*EXAMPLES))(collective)
