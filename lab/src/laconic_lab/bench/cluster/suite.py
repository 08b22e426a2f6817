"""Runs all parts of the parameter-server benchmark and returns Records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laconic.records import Record
from laconic.train.methods import METHODS
from laconic_lab.bench.cluster.aggregation import measure_aggregation
from laconic_lab.bench.cluster.exchange import model_shapes, numel
from laconic_lab.bench.cluster.load import measure_load
from laconic_lab.bench.cluster.processes import PACED, best_network
from laconic_lab.bench.cluster.rounds import measure_rate
from laconic_lab.bench.cluster.settings import ClusterSettings

__all__ = ["run"]

Tell = Callable[[str], None]


def run(settings: ClusterSettings, tell: Tell = lambda what: None) -> list[Record]:
    """Measure all parts; ``WrongResultError`` when a result is wrong."""
    records = []
    for part, measure in (("aggregation", _aggregation), ("rounds", _rounds), ("load", _load)):
        if part in settings.parts:
            records += measure(settings, tell)
    return records


def _record(kind: str, settings: ClusterSettings, values: dict[str, Any]) -> Record:
    return Record(f"cluster.{kind}", values | {"command": settings.command()}, seed=settings.seed)


def _aggregation(settings: ClusterSettings, tell: Tell) -> list[Record]:
    shapes = model_shapes(settings.model)
    result = measure_aggregation(
        shapes, rounds=settings.rounds, threads=settings.threads, seed=settings.seed, tell=tell
    )
    return [_record("aggregation", settings, result.values() | {"model": settings.model})]


def _rounds(settings: ClusterSettings, tell: Tell) -> list[Record]:
    shapes = model_shapes(settings.model)
    if settings.bundled:
        shapes = {"bundle 0": [1, numel(shapes)]}  # as laconic.train.bundling does
    made_of = PACED if settings.paced else best_network()
    records = []
    for rate in settings.rates:
        link, results = measure_rate(
            rate, settings.methods, shapes, made_of=made_of, rounds=settings.rounds, slow_rounds=settings.slow_rounds,
            workers=settings.workers, threads=settings.threads, seed=settings.seed, tell=tell,
        )  # fmt: skip
        records.append(_record("link", settings, link.values()))
        common = {"model": settings.model, "numel": numel(shapes), "made_of": made_of, "valid": link.valid}
        common |= {"slots": len(shapes)}
        for result in results:
            values = (
                result.values(results[0])
                | common
                | {"what": METHODS[result.method][0], "base": results[0].method, "workers": settings.workers}
            )
            records.append(_record("round", settings, values))
    return records


def _load(settings: ClusterSettings, tell: Tell) -> list[Record]:
    result = measure_load(
        clients=settings.clients, processes=min(settings.processes, settings.clients), seconds=settings.seconds,
        threads=1, tell=tell,
    )  # fmt: skip
    return [_record("load", settings, result.values())]
