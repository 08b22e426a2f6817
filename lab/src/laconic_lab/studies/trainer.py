"""Training of several runs side by side, which goes on after an interruption where it was."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import load_file, save_file

from laconic_lab.studies.stepper import Curve, Lane, Source, Trained

__all__ = ["Counter", "Progress", "Unit", "batched", "partial_folder", "resume", "save", "train"]

log = logging.getLogger("laconic")

S = TypeVar("S", bound=Trained)

Progress = Callable[[str, int, int], None]
"""Called with what is being trained, the run-epochs done and those in all."""

KEEP_EVERY = 60.0
"""Seconds after which unfinished runs are saved at the end of an epoch."""


@dataclass(frozen=True)
class Unit(Generic[S]):
    """One run of a part."""

    part: str
    setting: S
    epochs: int
    seed: int

    @property
    def key(self) -> str:
        return self.setting.key(self.part, self.epochs, self.seed)

    @property
    def file(self) -> str:
        return hashlib.sha256(self.key.encode()).hexdigest()[:16]


class Counter:
    """Run-epochs done."""

    def __init__(self, what: str, total: int, progress: Progress | None) -> None:
        self.what, self.total, self.progress, self.done = what, total, progress, 0

    def add(self, epochs: int) -> None:
        self.done += epochs
        if self.progress is not None:
            self.progress(self.what, self.done, self.total)


def partial_folder(records: Path | None) -> Path | None:
    """Where unfinished runs are kept beside a study's Records."""
    return None if records is None else records / "partial"


def batched(units: Sequence[Unit[S]], most: int) -> Iterator[list[Unit[S]]]:
    """Units that can run side by side: of one data set, model and length, and as many."""
    kinds: dict[tuple[object, ...], list[Unit[S]]] = {}
    for unit in units:
        setting = unit.setting
        kinds.setdefault((setting.data, setting.model, setting.batch, unit.epochs), []).append(unit)
    for some in kinds.values():
        yield from (some[at : at + most] for at in range(0, len(some), most))


def train(
    units: Sequence[Unit[S]],
    device: torch.device,
    data_dir: Path | None,
    lane_of: Callable[[Unit[S], Source], Lane],
    partial: Path | None,
    tick: Callable[[int], None],
) -> Iterator[tuple[Unit[S], Lane, float]]:
    """All of them, an iteration of each in turn."""
    source = Source(units[0].setting.data, data_dir, device)
    began, saved = time.perf_counter(), time.perf_counter()
    with _fast(device):
        lanes = [lane_of(unit, source) for unit in units]
        for unit, lane in zip(units, lanes, strict=True):
            resume(unit, lane, partial)
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
                    save(unit, lane, partial)
                saved = time.perf_counter()
    seconds = (time.perf_counter() - began) / len(units)
    for unit, lane in zip(units, lanes, strict=True):
        yield unit, lane, seconds
        if partial is not None:
            for path in partial.glob(f"{unit.file}.*"):
                path.unlink()


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


def save(unit: Unit[Any], lane: Lane, folder: Path) -> None:
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


def resume(unit: Unit[Any], lane: Lane, folder: Path | None) -> None:
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
