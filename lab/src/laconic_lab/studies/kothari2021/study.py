"""Run the study: what is missing is trained, several runs side by side, and a Record is written as each ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from laconic.errors import ConfigError
from laconic.records import Record
from laconic.train.devices import device_of
from laconic_lab.studies.kothari2021 import experiments, scaling, sizes, times
from laconic_lab.studies.kothari2021.settings import Setting
from laconic_lab.studies.kothari2021.stepper import ComputedLane, FrameLane, LocalLane, can_compute
from laconic_lab.studies.oland2015.record_log import Ledger
from laconic_lab.studies.stepper import Lane, Source
from laconic_lab.studies.trainer import Counter, Progress, Unit, batched, partial_folder, train

__all__ = ["KIND", "run"]

KIND, ROUND = "kothari2021.run", "kothari2021.round"

EPOCHS = {"vgg11": 30, "lenet5": 20}
LANES = 4


def run(
    part: str = "accuracy",
    *,
    models: Sequence[str] = ("lenet5", "vgg11"),
    methods: Sequence[str] | None = None,
    epochs: int | None = None,
    seeds: Sequence[int] | None = None,
    data: str | None = None,
    data_dir: Path | None = None,
    device: str = "auto",
    lanes: int | None = None,
    frames: bool = False,
    settings: Sequence[Setting] | None = None,
    timing: times.Plan | None = None,
    records: Path | None = None,
    progress: Progress | None = None,
) -> list[Record]:
    """Train or measure what a part asks for and is not in the Records yet; all of the part's Records.

    Args:
        part: One of ``PARTS``.
        models: Of ``lenet5`` and ``vgg11``; the part ``workers`` has LeNet-5 alone.
        methods: By default all, or the part's own.
        epochs: Passes over the images; by default 20 for LeNet-5 and 30 for VGG-11. The part ``times`` does not make
            them, but says what they would take; by default the paper's 20 and 50.
        seeds: By default 0 to 2 for methods 1, 5 and ours, 0 for the others.
        data: Another data set than the paper's, such as ``digits`` for LeNet-5.
        data_dir: Where its files lie.
        device: ``auto``, ``cpu`` or ``cuda``.
        lanes: Runs side by side; by default 4 on a GPU and 1 on a CPU.
        frames: Make every frame even where what it decodes to can be computed.
        settings: Instead of the part's own.
        timing: How long the part ``times`` measures.
        records: A folder: Records are kept in ``PART.jsonl`` there and found again, runs that are not over yet in
            ``partial``.
        progress: Told how far it is.
    """
    if part not in experiments.PARTS:
        raise ConfigError(f"unknown part {part!r}: expected one of {', '.join(experiments.PARTS)}")
    if epochs is not None and epochs < 1:
        raise ConfigError(f"epochs must be at least 1, got {epochs}")
    where = device_of(device)
    chosen = list(settings) if settings is not None else list(experiments.settings_of(part, models, methods, data))
    if part == times.PART:
        kept = records / f"{part}.jsonl" if records is not None else None
        return times.measure_all(
            chosen, timing or times.Plan(), epochs=epochs, data_dir=data_dir, records=kept, progress=progress
        )
    wanted = [
        Unit(part, setting, epochs or EPOCHS.get(setting.model, 10), seed)
        for setting in chosen
        for seed in experiments.seeds_of(part, setting, seeds)
    ]
    ledger = Ledger(records / f"{part}.jsonl" if records is not None else None)
    missing = [unit for unit in wanted if unit.key not in ledger]
    counter = Counter(part, sum(unit.epochs for unit in wanted), progress)
    counter.add(sum(unit.epochs for unit in wanted if unit.key in ledger))
    if part == "resnet50":
        both = [sizes.gradients_of("resnet50", 0, worker) for worker in range(2)] if missing else []
        for unit in missing:
            ledger.add(_record(unit, where, sizes.measure(unit.setting, both), ROUND))
            counter.add(unit.epochs)
    elif part == "workers":
        for unit in missing:
            values = scaling.train(unit.setting, unit.seed, unit.epochs, data_dir, counter.add)
            ledger.add(_record(unit, where, values))
    else:
        at_once = lanes or (LANES if where.type == "cuda" else 1)
        for batch in batched(missing, at_once):
            for unit, lane, seconds in train(
                batch,
                where,
                data_dir,
                lambda one, source: _lane(one, source, frames),
                partial_folder(records),
                counter.add,
            ):
                values = {"iterations": lane.iterations, "seconds": round(seconds, 3), **asdict(lane.curve)}
                ledger.add(_record(unit, where, values))
    return [ledger.records[unit.key] for unit in wanted]


def _record(unit: Unit[Setting], where: torch.device, values: dict[str, Any], kind: str = KIND) -> Record:
    known = {"key": unit.key, "part": unit.part, "device": where.type, "epochs": unit.epochs, "seed": unit.seed}
    return Record(kind, known | unit.setting.values() | values, seed=unit.seed)


def _lane(unit: Unit[Setting], source: Source, frames: bool) -> Lane:
    kind: type[Lane] = FrameLane
    if can_compute(unit.setting) and not frames:
        kind = ComputedLane if unit.setting.job(unit.seed).every == 1 else LocalLane
    return kind(unit.setting, unit.seed, unit.epochs, source)
