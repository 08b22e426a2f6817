"""Run the study: what is missing is trained, several runs side by side, and a Record is written as each ends."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from laconic.errors import ConfigError
from laconic.records import Record
from laconic.studies.kothari2021 import crowds, parts, sizes, times
from laconic.studies.kothari2021.lanes import ComputedLane, Curve, FrameLane, Lane, LocalLane, Source, can_compute
from laconic.studies.kothari2021.settings import Setting
from laconic.studies.oland2015.ledger import Ledger

__all__ = ["KIND", "run"]

log = logging.getLogger("laconic")

KIND, ROUND = "kothari2021.run", "kothari2021.round"

Progress = Callable[[str, int, int], None]
"""Called with what is being trained, the run-epochs done and those in all."""

EPOCHS = {"vgg11": 30, "lenet5": 20}
LANES = 4
KEEP_EVERY = 60.0
"""Seconds after which unfinished runs are saved at the end of an epoch."""


class Unit(NamedTuple):
    part: str
    setting: Setting
    epochs: int
    seed: int

    @property
    def key(self) -> str:
        return self.setting.key(self.part, self.epochs, self.seed)

    @property
    def file(self) -> str:
        return hashlib.sha256(self.key.encode()).hexdigest()[:16]


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
    if part not in parts.PARTS:
        raise ConfigError(f"unknown part {part!r}: expected one of {', '.join(parts.PARTS)}")
    if epochs is not None and epochs < 1:
        raise ConfigError(f"epochs must be at least 1, got {epochs}")
    where = _device(device)
    chosen = list(settings) if settings is not None else list(parts.settings_of(part, models, methods, data))
    if part == times.PART:
        kept = records / f"{part}.jsonl" if records is not None else None
        return times.measure_all(
            chosen, timing or times.Plan(), epochs=epochs, data_dir=data_dir, records=kept, progress=progress
        )
    wanted = [
        Unit(part, setting, epochs or EPOCHS.get(setting.model, 10), seed)
        for setting in chosen
        for seed in parts.seeds_of(part, setting, seeds)
    ]
    ledger = Ledger(records / f"{part}.jsonl" if records is not None else None)
    missing = [unit for unit in wanted if unit.key not in ledger]
    counter = _Counter(part, sum(unit.epochs for unit in wanted), progress)
    counter.add(sum(unit.epochs for unit in wanted if unit.key in ledger))
    if part == "resnet50":
        both = [sizes.gradients_of("resnet50", 0, worker) for worker in range(2)] if missing else []
        for unit in missing:
            ledger.add(_record(unit, where, sizes.measure(unit.setting, both), ROUND))
            counter.add(unit.epochs)
    elif part == "workers":
        for unit in missing:
            values = crowds.train(unit.setting, unit.seed, unit.epochs, data_dir, counter.add)
            ledger.add(_record(unit, where, values))
    else:
        at_once = lanes or (LANES if where.type == "cuda" else 1)
        for batch in _batched(missing, at_once):
            for unit, lane, seconds in _train(batch, where, data_dir, frames, _partial(records), counter.add):
                values = {"iterations": lane.iterations, "seconds": round(seconds, 3), **asdict(lane.curve)}
                ledger.add(_record(unit, where, values))
    return [ledger.records[unit.key] for unit in wanted]


class _Counter:
    def __init__(self, what: str, total: int, progress: Progress | None) -> None:
        self.what, self.total, self.progress, self.done = what, total, progress, 0

    def add(self, epochs: int) -> None:
        self.done += epochs
        if self.progress is not None:
            self.progress(self.what, self.done, self.total)


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here: take --device cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _record(unit: Unit, where: torch.device, values: dict[str, Any], kind: str = KIND) -> Record:
    known = {"key": unit.key, "part": unit.part, "device": where.type, "epochs": unit.epochs, "seed": unit.seed}
    return Record(kind, known | unit.setting.values() | values, seed=unit.seed)


def _batched(units: Sequence[Unit], most: int) -> Iterator[list[Unit]]:
    """Units that can run side by side: of one data set, model and length, and as many."""
    kinds: dict[tuple[object, ...], list[Unit]] = {}
    for unit in units:
        setting = unit.setting
        kinds.setdefault((setting.data, setting.model, setting.batch, unit.epochs), []).append(unit)
    for some in kinds.values():
        yield from (some[at : at + most] for at in range(0, len(some), most))


def _partial(records: Path | None) -> Path | None:
    return None if records is None else records / "partial"


def _train(
    units: Sequence[Unit],
    device: torch.device,
    data_dir: Path | None,
    frames: bool,
    partial: Path | None,
    tick: Callable[[int], None],
) -> Iterator[tuple[Unit, Lane, float]]:
    """All of them, an iteration of each in turn."""
    source = Source(units[0].setting.data, data_dir, device)
    began, saved = time.perf_counter(), time.perf_counter()
    with _fast(device):
        lanes = [_lane(unit, source, frames) for unit in units]
        for unit, lane in zip(units, lanes, strict=True):
            _resume(unit, lane, partial)
            tick(lane.done)
        while any(lane.done < lane.epochs for lane in lanes):
            active = [lane for lane in lanes if lane.done < lane.epochs]
            for lane in active:
                lane.begin_epoch()
            for _ in range(active[0].per_epoch):
                for lane in active:
                    lane.step()
            for lane in active:
                lane.end_epoch()
                tick(1)
            if partial is not None and time.perf_counter() - saved > KEEP_EVERY:
                for unit, lane in zip(units, lanes, strict=True):
                    _save(unit, lane, partial)
                saved = time.perf_counter()
    seconds = (time.perf_counter() - began) / len(units)
    for unit, lane in zip(units, lanes, strict=True):
        yield unit, lane, seconds
        if partial is not None:
            for path in partial.glob(f"{unit.file}.*"):
                path.unlink()


def _lane(unit: Unit, source: Source, frames: bool) -> Lane:
    kind: type[Lane] = FrameLane
    if can_compute(unit.setting) and not frames:
        kind = ComputedLane if unit.setting.job(unit.seed).every == 1 else LocalLane
    return kind(unit.setting, unit.seed, unit.epochs, source)


class _fast:  # noqa: N801 - read as a word
    """TF32 products on a GPU (ten bits of mantissa, float32 sums) and the fastest convolutions; then as before."""

    def __init__(self, device: torch.device) -> None:
        self.on = device.type == "cuda"

    def __enter__(self) -> None:
        backends = torch.backends
        self.before = (backends.cudnn.benchmark, backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32)
        if self.on:
            backends.cudnn.benchmark = backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = True

    def __exit__(self, *_: object) -> None:
        backends = torch.backends
        backends.cudnn.benchmark, backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = self.before


def _save(unit: Unit, lane: Lane, folder: Path) -> None:
    """What an interruption would cost, as two files; the second one says that the first is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = folder / f"{unit.file}.{lane.done}.safetensors"
    save_file({name: x.detach().cpu().contiguous().clone() for name, x in lane.state().items()}, str(tensors))
    told = folder / f"{unit.file}.json"
    fresh = told.with_suffix(".json.new")
    fresh.write_text(json.dumps({"key": unit.key, "done": lane.done, "curve": asdict(lane.curve)}), encoding="utf-8")
    fresh.replace(told)
    for old in folder.glob(f"{unit.file}.*.safetensors"):
        if old != tensors:
            old.unlink()


def _resume(unit: Unit, lane: Lane, folder: Path | None) -> None:
    told = None if folder is None else folder / f"{unit.file}.json"
    if told is None or not told.exists():
        return
    assert folder is not None
    found = json.loads(told.read_text(encoding="utf-8"))
    tensors = folder / f"{unit.file}.{found['done']}.safetensors"
    if found["key"] != unit.key or not tensors.exists():
        return
    lane.done = int(found["done"])
    lane.curve = Curve(**found["curve"])
    lane.load(load_file(str(tensors)))
    log.info("%s goes on after %d epochs", unit.setting.name, lane.done)
