"""``laconic bench cluster``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from laconic.cli.options import Json, RecordFile, option
from laconic.cli.output import examples
from laconic.cli.roles import check_grpc
from laconic_lab.cli.results import given, measure_and_show, names

__all__ = ["EXAMPLES", "cluster", "register"]

EXAMPLES = (
    "laconic bench cluster --quick",
    "laconic bench cluster --part aggregation --record aggregation.jsonl",
    "laconic bench cluster --part rounds --methods 1,5 --rates 100mbit",
    "laconic bench cluster --part load --clients 4 --processes 1 --seconds 1 --json",
)


def cluster(
    part: Annotated[list[str] | None, option("aggregation, rounds or load.", metavar="NAME")] = None,
    model: Annotated[str | None, option("Model whose slots are exchanged.", "vgg11")] = None,
    rounds: Annotated[int | None, option("Rounds that count.", "9")] = None,
    slow_rounds: Annotated[int | None, option("Timed rounds where a round takes more than two seconds.", "3")] = None,
    workers: Annotated[int | None, option("Of rounds.", "2")] = None,
    methods: Annotated[
        str | None, option("Methods of rounds; the first is the baseline.", "1,4,5,laconic", metavar="M,M,…")
    ] = None,
    rates: Annotated[str | None, option("Of links.", "unshaped,1gbit,100mbit", metavar="R,R,…")] = None,
    bundled: Annotated[
        bool,
        typer.Option("--bundled", help="For rounds: exchange all tensors as one vector, like laconic train --bundled."),
    ] = False,
    paced: Annotated[
        bool, typer.Option("--paced", help="Emulate slow links by a proxy on loopback, as always without root.")
    ] = False,
    clients: Annotated[int | None, option("Of load.", "64")] = None,
    processes: Annotated[int | None, option("Processes that the clients are threads of.", "4")] = None,
    seconds: Annotated[float | None, option("How long they push.", "30")] = None,
    seed: Annotated[int, option("Seed of the gradients.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A small model and few rounds, for a quick look.")] = False,
    record: RecordFile = None,
    json: Json = False,
) -> None:
    """Time a server and its workers, as processes that exchange without training.

    aggregation: throughput of a server relative to bare gRPC.
    rounds: exchanges of several methods over links of several rates; as root
    in network namespaces, each host with a shaped link and mutual TLS.
    load: many clients without torch at one server: errors, latency, memory.

    Results are checked: replies against the same job in one process, bytes
    against the frames, sums against the acknowledged pushes.
    """
    from laconic_lab.bench.cluster import ClusterSettings, tables
    from laconic_lab.bench.cluster.suite import run

    check_grpc()
    settings = ClusterSettings().quick() if quick else ClusterSettings()
    chosen = given(
        parts=tuple(part or ()), model=model, rounds=rounds, slow_rounds=slow_rounds, workers=workers,
        methods=names(methods), rates=names(rates), clients=clients, processes=processes, seconds=seconds, paced=paced,
        bundled=bundled,
    )  # fmt: skip
    settings = replace(settings, seed=seed, **chosen)
    measure_and_show("cluster", settings, run, tables, record, json)


def register(app: typer.Typer) -> None:
    app.command("cluster", epilog=examples(*EXAMPLES))(cluster)
