"""Runs the experiments: what has no Record yet is measured."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.layers import compress, timings
from laconic.plan.calibration import clock_of
from laconic.records import Record
from laconic.train.devices import device_of
from laconic.train.models import build_model, seeded
from laconic.train.task import cross_entropy
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.jang2017 import compression, operations, reader, runs
from laconic_lab.studies.jang2017.results import KERNELS, READER, STEP, TABLE
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.study import check_experiment
from laconic_lab.studies.trainer import Progress, single_thread

__all__ = ["EXPERIMENTS", "run"]

EXPERIMENTS = ("table1", "steps", "recurrent", "kernels", runs.EXPERIMENT)

READER_SCHEMES = ("lowrank:0.5", "lowrank:0.2", "monarch:0.2", "subspace:0.1")
"""Schemes of the reader's convolutions and LSTMs, beside the paper's assumed rho of 0.5."""

BATCH = {"alexnet": {"cpu": 16, "cuda": 256}, "reader": {"cpu": 16, "cuda": 256}}


def run(
    experiment: str = "table1", *, data: str = "digits", data_dir: Path | None = None, device: str = "auto",
    links: Sequence[str] | None = None, records: Path | None = None, progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> list[Record]:  # fmt: skip
    """Run an experiment and return its Records; what is in the Records already is not measured again.

    Args:
        experiment: ``table1`` (gzip and other methods on weights and on data), ``steps`` (seconds of a step of AlexNet
            and of the reader), ``recurrent`` (rho and h of the reader with compressed LSTMs), ``kernels`` (AlexNet's
            operations) or ``runs`` (predicted and measured; needs root).
        data: Data set whose images table 1 compresses.
        device: ``auto``, ``cpu`` or ``cuda``, for steps and kernels.
        links: Links of ``runs``, some of ``runs.RATES``; all by default.
        records: Folder in which Records are kept, one file for each experiment.
    """
    check_experiment(experiment, EXPERIMENTS)
    finished = RecordLog.of_experiment(records, experiment)
    if experiment == runs.EXPERIMENT:
        wanted = runs.all_cells(links=links or runs.RATES)
        return runs.measure_all(wanted, records=finished, progress=progress, deadline=deadline)
    where = device_of(device).type
    if experiment == "table1":
        return _table(finished, data, data_dir, progress)
    if experiment == "steps":
        return [_step(finished, name, where, progress) for name in BATCH]
    if experiment == "recurrent":
        return [_compressed_reader(finished, scheme, where, progress) for scheme in READER_SCHEMES]
    return [_kernels(finished, where, progress)]


def _table(finished: RecordLog, data: str, data_dir: Path | None, progress: Progress | None) -> list[Record]:
    key = json.dumps(["table1", data])
    known = [record for record_key, record in finished.records.items() if record_key.startswith(key)]
    if known:
        return known
    rows = []
    with single_thread():
        for row in compression.measure(data, data_dir):
            rows.append(row)
            if progress is not None:
                progress(f"{row['what']}, {row['way']}", len(rows), 2 + 2 + len(compression.CODECS))
    common = {"part": "table1", "threads": 1, "clock": "cpu"}
    measured = [Record(TABLE, {"key": f"{key} {row['what']} {row['way']}", **common, **row}) for row in rows]
    for record in measured:
        finished.add(record)
    return measured


def _step(finished: RecordLog, name: str, device: str, progress: Progress | None) -> Record:
    key = json.dumps(["steps", name, device])
    if key not in finished:
        if progress is not None:
            progress(f"a step of {name}", 0, 1)
        with single_thread():
            finished.add(Record(STEP, {"key": key, "part": "steps", **_timed(name, device)}))
    return finished.records[key]


def _compressed_reader(finished: RecordLog, scheme: str, device: str, progress: Progress | None) -> Record:
    """Return rho and h of the reader with compressed convolutions and LSTMs, measured in turns with the dense one."""
    key = json.dumps(["recurrent", scheme, device])
    if key not in finished:
        if progress is not None:
            progress(f"the reader with {scheme}", 0, 1)
        size, where = BATCH["reader"][device], torch.device(device)
        with single_thread(), seeded(0):
            dense = reader.LineReader().to(where)
            compressed = compress(dense, scheme, init="fresh")
            batch = tuple(x.to(where) for x in reader.lines(size))
            timed = timings(dense, compressed, batch, loss=reader.ctc)
        values = {"model": "reader", "device": device, "batch": size, "threads": 1, "scheme": scheme}
        finished.add(Record(READER, {"key": key, "part": "recurrent", **values, **timed.values()}))
    return finished.records[key]


def _timed(name: str, device: str, turns: int = 7) -> dict[str, Any]:
    """Return the median seconds of forward, backward and update."""
    where, size = torch.device(device), BATCH[name][device]
    loss: Callable[[Tensor, Tensor], Tensor]
    if name == "reader":
        model: nn.Module = reader.LineReader()
        (inputs, targets), loss = reader.lines(size), reader.ctc
    else:
        model, loss = build_model(name, seed=0), cross_entropy
        inputs, targets = torch.randn(size, 3, 224, 224), torch.randint(1000, (size,))
    model, inputs, targets = model.to(where), inputs.to(where), targets.to(where)
    optimizer, now = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9), clock_of(where)
    took: list[float] = []
    began = time.perf_counter()
    while len(took) < 2 + turns and (len(took) < 4 or time.perf_counter() - began < 60):
        begin = now()
        optimizer.zero_grad(set_to_none=True)
        loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        took.append(now() - begin)
    numel = sum(parameter.numel() for parameter in model.parameters())
    return {
        "model": name, "device": device, "batch": size, "numel": numel, "step_s": statistics.median(took[2:]),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def _kernels(finished: RecordLog, device: str, progress: Progress | None) -> Record:
    key = json.dumps(["kernels", device])
    if key not in finished:
        if progress is not None:
            progress(f"operations on {device}", 0, 1)
        finished.add(Record(KERNELS, {"key": key, "part": "kernels", **operations.share(device)}))
    return finished.records[key]
