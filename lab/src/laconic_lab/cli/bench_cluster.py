"""``laconic bench cluster``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.output import check_writable, examples, print_json, print_stderr, progress_bar, stdout_console
from laconic.cli.roles import check_grpc

if TYPE_CHECKING:
    from laconic.records import Record
    from laconic_lab.bench.cluster import ClusterTable

__all__ = ["EXAMPLES", "cluster", "print_table", "register"]

EXAMPLES = (
    "laconic bench cluster --quick",
    "laconic bench cluster --part aggregation --record aggregation.jsonl",
    "laconic bench cluster --part rounds --methods 1,5 --rates 100mbit",
    "laconic bench cluster --part load --clients 4 --processes 1 --seconds 1 --json",
)


def cluster(
    part: Annotated[
        list[str] | None, typer.Option("--part", metavar="NAME", help="aggregation, rounds or load.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model whose slots are exchanged.", show_default="vgg11")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds that count.", show_default="9")] = None,
    slow_rounds: Annotated[
        int | None, typer.Option(help="Timed rounds where a round takes more than two seconds.", show_default="3")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Of rounds.", show_default="2")] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="M,M,…", help="Methods of rounds; the first is the baseline.", show_default="1,4,5,laconic"
        ),
    ] = None,
    rates: Annotated[
        str | None, typer.Option(metavar="R,R,…", help="Of links.", show_default="unshaped,1gbit,100mbit")
    ] = None,
    bundled: Annotated[
        bool,
        typer.Option("--bundled", help="For rounds: exchange all tensors as one vector, like laconic train --bundled."),
    ] = False,
    paced: Annotated[
        bool, typer.Option("--paced", help="Emulate slow links by a proxy on loopback, as always without root.")
    ] = False,
    clients: Annotated[int | None, typer.Option(help="Of load.", show_default="64")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes that the clients are threads of.", show_default="4")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="How long they push.", show_default="30")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the gradients.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A small model and few rounds, for a quick look.")] = False,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE.jsonl", help="Write Records, one JSON object per line.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time a server and its workers, as processes that exchange without training.

    aggregation: throughput of a server relative to bare gRPC.
    rounds: exchanges of several methods over links of several rates; as root
    in network namespaces, each host with a shaped link and mutual TLS.
    load: many clients without torch at one server: errors, latency, memory.

    Results are checked: replies against the same job in one process, bytes
    against the frames, sums against the acknowledged pushes.
    """
    from laconic_lab.bench.cluster import ClusterSettings

    check_grpc()
    settings = ClusterSettings().quick() if quick else ClusterSettings()
    given: dict[str, Any] = {
        "parts": tuple(part) if part else None,
        "model": model,
        "rounds": rounds,
        "slow_rounds": slow_rounds,
        "workers": workers,
        "methods": _words(methods),
        "rates": _words(rates),
        "clients": clients,
        "processes": processes,
        "seconds": seconds,
        "paced": paced,
        "bundled": bundled,
        "seed": seed,
    }
    settings = replace(settings, **{k: v for k, v in given.items() if v is not None})
    if record is not None:
        check_writable(record)
    from laconic.records import write
    from laconic_lab.bench.cluster.suite import run

    with progress_bar("cluster") as (bar, task):
        found = run(settings, tell=lambda what: bar.update(task, description=what))
    if record is not None:
        write(found, record)
        print_stderr(f"{len(found)} Records written to {record}")
    if json:
        print_json({"command": settings.command(), "records": [_json(one) for one in found]})
    else:
        _print(found)


def _words(text: str | None) -> tuple[str, ...] | None:
    words = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    return words or None


def _json(record: Record) -> dict[str, Any]:
    return {"kind": record.kind, **record.values}


def _print(records: Sequence[Record]) -> None:
    from laconic_lab.bench.cluster import tables

    for found in tables(records):
        print_table(found)


def print_table(found: ClusterTable) -> None:
    from rich import box
    from rich.table import Table

    console = stdout_console()
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(found.columns):
        shown.add_column(column, justify="left" if number < found.words else "right")
    for row in found.rows:
        shown.add_row(*row)
    console.print(shown, markup=False)
    console.print(found.notes, markup=False)
    for met, text in found.verdicts:
        console.print(text, style="green" if met else "red", markup=False)
    console.print()


def register(app: typer.Typer) -> None:
    app.command("cluster", epilog=examples(*EXAMPLES))(cluster)
