"""Run the study: what is missing is trained or timed, and a Record is written as each ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from laconic.errors import ConfigError
from laconic.records import Record
from laconic.train.devices import device_of
from laconic_lab.studies.homomorphic import speed
from laconic_lab.studies.homomorphic.experiments import PARTS, seeds_of, settings_of
from laconic_lab.studies.homomorphic.settings import HYPER, Setting
from laconic_lab.studies.homomorphic.stepper import SummedLane
from laconic_lab.studies.oland2015.record_log import Ledger
from laconic_lab.studies.trainer import Counter, Progress, Unit, batched, partial_folder, train

__all__ = ["KIND", "run"]

KIND = "homomorphic.run"
LANES = 6


def run(
    part: str = "sums",
    *,
    models: Sequence[str] = tuple(HYPER),
    epochs: int | None = None,
    seeds: Sequence[int] | None = None,
    data: str | None = None,
    data_dir: Path | None = None,
    device: str = "auto",
    lanes: int | None = None,
    settings: Sequence[Setting] | None = None,
    records: Path | None = None,
    progress: Progress | None = None,
) -> list[Record]:
    """Train or time what a part asks for and is not in the Records yet; all of the part's Records.

    Args:
        part: One of ``PARTS``.
        models: Of ``mlp``, ``lenet5`` and ``vgg11``. The part ``speed`` has models and layers of its own.
        epochs: Passes over the images; by default 10, and 20 for VGG-11.
        seeds: By default 0 to 2 for the MLP and the rows that VGG-11 is judged by, 0 for the others.
        data: Another data set than the model's own, such as ``digits``.
        data_dir: Where its files lie.
        device: ``auto``, ``cpu`` or ``cuda``. On a CPU sums are made of real frames.
        lanes: Runs side by side; by default 6 on a GPU and 1 on a CPU.
        settings: Instead of the part's own.
        records: A folder: Records are kept in ``PART.jsonl`` there and found again, runs that are not over yet in
            ``partial``.
        progress: Told how far it is.
    """
    if part not in PARTS:
        raise ConfigError(f"unknown part {part!r}: expected one of {', '.join(PARTS)}")
    if epochs is not None and epochs < 1:
        raise ConfigError(f"epochs must be at least 1, got {epochs}")
    where = device_of(device)
    ledger = Ledger(records / f"{part}.jsonl" if records is not None else None)
    if part == "speed":
        return speed.measure_all(where, ledger, progress)
    chosen = list(settings) if settings is not None else list(settings_of(part, models, data))
    wanted = [
        Unit(part, setting, epochs or HYPER[setting.model].epochs, seed)
        for setting in chosen
        for seed in seeds_of(part, setting, seeds)
    ]
    missing = [unit for unit in wanted if unit.key not in ledger]
    counter = Counter(part, sum(unit.epochs for unit in wanted), progress)
    counter.add(sum(unit.epochs for unit in wanted if unit.key in ledger))
    at_once = lanes or (LANES if where.type == "cuda" else 1)
    for batch in batched(missing, at_once):
        for unit, lane, seconds in train(
            batch,
            where,
            data_dir,
            lambda one, source: SummedLane(one.setting, one.seed, one.epochs, source),
            partial_folder(records),
            counter.add,
        ):
            known = {"key": unit.key, "part": part, "device": where.type, "epochs": unit.epochs, "seed": unit.seed}
            values = {"iterations": lane.iterations, "seconds": round(seconds, 3), **asdict(lane.curve), **lane.told()}
            ledger.add(Record(KIND, known | unit.setting.values() | values, seed=unit.seed))
    return [ledger.records[unit.key] for unit in wanted]
