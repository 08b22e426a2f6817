"""Run the study: what is missing is measured, and a Record is written as each is."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import ConfigError
from laconic.plan.calibration import check_device, clock_of
from laconic.records import Record
from laconic.train.models import build_model
from laconic.train.task import cross_entropy
from laconic_lab.studies.jang2017 import compression, operations, reader, runs
from laconic_lab.studies.oland2015.record_log import Ledger

__all__ = ["KERNELS", "PARTS", "STEP", "TABLE", "run"]

PARTS = ("table1", "steps", "kernels", runs.PART)
TABLE, STEP, KERNELS = "jang2017.table1", "jang2017.step", "jang2017.kernels"

BATCH = {"alexnet": {"cpu": 16, "cuda": 256}, "reader": {"cpu": 16, "cuda": 256}}

Progress = Callable[[str, int, int], None]


def run(
    part: str = "table1",
    *,
    data: str = "digits",
    data_dir: Path | None = None,
    device: str = "auto",
    cells: Sequence[runs.Cell] | None = None,
    records: Path | None = None,
    progress: Progress | None = None,
) -> list[Record]:
    """Measure what a part asks for and is not in the Records yet; all of the part's Records.

    Args:
        part: ``table1`` (gzip and others on weights and on data), ``steps`` (seconds of AlexNet's and the reader's),
            ``kernels`` (where AlexNet's go) or ``runs`` (predicted against measured; needs root).
        data: Whose images table 1 compresses.
        data_dir: Where its files lie.
        device: ``auto``, ``cpu`` or ``cuda``, for steps and kernels.
        cells: Of ``runs``; all by default.
        records: A folder: Records are kept in ``PART.jsonl`` there and found again.
        progress: Told how far it is.
    """
    if part not in PARTS:
        raise ConfigError(f"unknown part {part!r}: expected one of {', '.join(PARTS)}")
    path = records / f"{part}.jsonl" if records is not None else None
    if part == runs.PART:
        return runs.measure_all(cells if cells is not None else runs.all_cells(), records=path, progress=progress)
    where = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device
    check_device(where)
    ledger = Ledger(path)
    wanted = {
        "table1": lambda: _table(ledger, data, data_dir, progress),
        "steps": lambda: [_step(ledger, name, where, progress) for name in BATCH],
        "kernels": lambda: [_kernels(ledger, where, progress)],
    }
    return wanted[part]()


def _table(ledger: Ledger, data: str, data_dir: Path | None, progress: Progress | None) -> list[Record]:
    key = json.dumps(["table1", data])
    mine = [record for known, record in ledger.records.items() if known.startswith(key)]
    if mine:
        return mine
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for row in compression.measure(data, data_dir):
            rows.append(row)
            if progress is not None:
                progress(f"{row['what']}, {row['way']}", len(rows), 2 + 2 + len(compression.CODECS))
    finally:
        torch.set_num_threads(before)
    found = [
        Record(
            TABLE, {"key": f"{key} {row['what']} {row['way']}", "part": "table1", "threads": 1, "clock": "cpu", **row}
        )
        for row in rows
    ]
    for record in found:
        ledger.add(record)
    return found


def _step(ledger: Ledger, name: str, device: str, progress: Progress | None) -> Record:
    key = json.dumps(["steps", name, device])
    if key not in ledger:
        if progress is not None:
            progress(f"a step of {name}", 0, 1)
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            ledger.add(Record(STEP, {"key": key, "part": "steps", **_timed(name, device)}))
        finally:
            torch.set_num_threads(before)
    return ledger.records[key]


def _timed(name: str, device: str, turns: int = 7) -> dict[str, Any]:
    """Seconds of forward, backward and the update."""
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


def _kernels(ledger: Ledger, device: str, progress: Progress | None) -> Record:
    key = json.dumps(["kernels", device])
    if key not in ledger:
        if progress is not None:
            progress(f"operations on {device}", 0, 1)
        ledger.add(Record(KERNELS, {"key": key, "part": "kernels", **operations.share(device)}))
    return ledger.records[key]
