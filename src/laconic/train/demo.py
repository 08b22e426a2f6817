"""The runs of ``laconic demo``: one method after the other on the embedded digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laconic.cluster.job import Job
from laconic.errors import ConfigError
from laconic.records import Record, read
from laconic.train.methods import METHODS, method_options
from laconic.train.run import RECORDS, Config, whole_exchanges

__all__ = ["DEMO_METHODS", "demo_config", "demo_records", "page_records"]

DEMO_METHODS = ("1", "2", "3", "4", "5", "6", "adaptive", "laconic")
WORKERS = 2


def demo_config(method: str, iterations: int) -> Config:
    if iterations < 1:
        raise ConfigError(f"--iterations must be at least 1, got {iterations}")
    job = Job(**{"workers": WORKERS, "lr": 0.05} | method_options(method))
    iterations = whole_exchanges(iterations, job)
    return Config(model="mlp", data="digits", iterations=iterations, method=method, job=job)


def demo_records(summaries: Sequence[Mapping[str, Any]], command: str) -> list[Record]:
    """Return one Record for each method."""
    return [
        Record("demo.method", {**summary, "what": METHODS[summary["method"]][0], "command": command})
        for summary in summaries
    ]


def page_records(records: Sequence[Record], runs: Mapping[Path, Config]) -> list[Record]:
    """Return the Records for the report: those of the methods, completed and followed by those of the run folders."""
    by_method: dict[str, Record] = {record.values["method"]: record for record in records}
    others = []
    for run_dir, config in runs.items():
        for record in read(run_dir / RECORDS) if (run_dir / RECORDS).exists() else ():
            values = {**record.values, "run": config.method}
            if record.kind == "train.run":
                known = by_method[config.method]
                by_method[config.method] = replace(known, values={**values, **known.values})
            else:
                others.append(replace(record, values=values))
    return [replace(each, values={**each.values, "run": name}) for name, each in by_method.items()] + others
