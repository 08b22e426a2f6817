"""Training of several runs side by side; after an interruption it continues where it stopped."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import load_file, save_file

from laconic.records import Record
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.stepper import Curve, Source, Stepper, StepperSetting

__all__ = [
    "Counter",
    "Progress",
    "Unit",
    "batched",
    "fast_products",
    "resume",
    "run_units",
    "save",
    "single_thread",
    "train",
]

log = logging.getLogger("laconic")

S = TypeVar("S", bound=StepperSetting)

Progress = Callable[[str, int, int], None]
"""Called with the name of the work, the run-epochs done and their total."""

SAVE_EVERY_S = 300.0
"""Seconds after which unfinished runs are saved at the end of an epoch."""


@dataclass(frozen=True)
class Unit(Generic[S]):
    """One run of an experiment."""

    experiment: str
    setting: S
    epochs: int
    seed: int

    @property
    def key(self) -> str:
        return self.setting.key(self.experiment, self.epochs, self.seed)

    @property
    def file(self) -> str:
        return hashlib.sha256(self.key.encode()).hexdigest()[:16]

    def record(self, kind: str, device: torch.device, values: dict[str, Any]) -> Record:
        """Return the Record of the finished run."""
        known = {"key": self.key, "part": self.experiment, "device": device.type, "epochs": self.epochs,
                 "seed": self.seed}  # fmt: skip
        return Record(kind, known | self.setting.values() | values, seed=self.seed)


class Counter:
    """Counts run-epochs and reports progress."""

    def __init__(self, name: str, total: int, progress: Progress | None) -> None:
        self.name, self.total, self.progress, self.done = name, total, progress, 0

    def add(self, epochs: int) -> None:
        self.done += epochs
        if self.progress is not None:
            self.progress(self.name, self.done, self.total)


Values = dict[str, Any]


def run_units(
    units: Sequence[Unit[S]], records: RecordLog, kind: str, device: torch.device, progress: Progress | None,
    work: Callable[[list[Unit[S]], Counter], Iterator[tuple[Unit[S], Values]]],
) -> list[Record]:  # fmt: skip
    """Do the units that have no Record yet, and return the Records of all.

    Args:
        units: Runs of one experiment.
        records: The experiment's Records; a Record is added as each run ends.
        work: Yields each of the given units with the values of its Record.
    """
    missing = [unit for unit in units if unit.key not in records]
    total = sum(unit.epochs for unit in units)
    counter = Counter(units[0].experiment if units else "", total, progress)
    counter.add(total - sum(unit.epochs for unit in missing))
    for unit, values in work(missing, counter):
        records.add(unit.record(kind, device, values))
    return [records.records[unit.key] for unit in units]


def batched(units: Sequence[Unit[S]], size: int) -> Iterator[list[Unit[S]]]:
    """Yield groups of units that can run side by side: they share data set, model, batch and length."""
    groups: dict[tuple[object, ...], list[Unit[S]]] = {}
    for unit in units:
        setting = unit.setting
        groups.setdefault((setting.data, setting.model, setting.batch, unit.epochs), []).append(unit)
    for group in groups.values():
        yield from (group[start : start + size] for start in range(0, len(group), size))


def train(
    units: Sequence[Unit[S]], device: torch.device, data_dir: Path | None,
    make_stepper: Callable[[Unit[S], Source], Stepper], records: Path | None, tick: Callable[[int], None],
    deadline: Deadline | None = None,
) -> Iterator[tuple[Unit[S], Values]]:  # fmt: skip
    """Train the units together, an iteration of each in turn, and yield what their Records shall hold.

    Unfinished runs are saved in the folder ``partial`` beside the Records, and after the deadline at the end of the
    epoch.
    """
    partial, deadline = None if records is None else records / "partial", deadline or Deadline()
    deadline.check()
    source = Source(units[0].setting.data, data_dir, device)
    began = saved = time.perf_counter()
    with fast_products(device):
        steppers = [make_stepper(unit, source) for unit in units]
        earlier = [resume(unit, stepper, partial) for unit, stepper in zip(units, steppers, strict=True)]
        for stepper in steppers:
            tick(stepper.done)
        while any(stepper.done < stepper.epochs for stepper in steppers):
            active = [stepper for stepper in steppers if stepper.done < stepper.epochs]
            for stepper in active:
                stepper.begin_epoch()
            for _ in range(active[0].per_epoch):
                for stepper in active:
                    stepper.step()
            for stepper in active:
                stepper.end_epoch()
                tick(1)
            over = deadline.passed and any(stepper.done < stepper.epochs for stepper in steppers)
            if partial is not None and (over or time.perf_counter() - saved > SAVE_EVERY_S):
                share = (time.perf_counter() - began) / len(units)
                for unit, stepper, seconds in zip(units, steppers, earlier, strict=True):
                    save(unit, stepper, partial, seconds + share)
                saved = time.perf_counter()
            if over:
                deadline.check()
    share = (time.perf_counter() - began) / len(units)
    for unit, stepper, seconds in zip(units, steppers, earlier, strict=True):
        known = {"iterations": stepper.iterations, "seconds": round(seconds + share, 3)}
        yield unit, known | asdict(stepper.curve) | stepper.summary()
        if partial is not None:
            for path in partial.glob(f"{unit.file}.*"):
                path.unlink()


@contextmanager
def single_thread() -> Iterator[None]:
    """Let torch use one thread within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Use TF32 products (ten bits of mantissa, float32 sums) and the fastest convolutions on a GPU within the block."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32)
    if device.type == "cuda":
        cudnn.benchmark = cudnn.allow_tf32 = matmul.allow_tf32 = True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def save(unit: Unit[Any], stepper: Stepper, folder: Path, seconds: float = 0.0) -> None:
    """Write an unfinished run and the seconds that it took so far; a second file marks the first as complete."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = folder / f"{unit.file}.{stepper.done}.safetensors"
    save_file({name: x.detach().cpu().contiguous().clone() for name, x in stepper.state().items()}, str(tensors))
    summary = folder / f"{unit.file}.json"
    fresh = summary.with_suffix(".json.new")
    values = {"key": unit.key, "done": stepper.done, "seconds": seconds, "curve": asdict(stepper.curve)}
    fresh.write_text(json.dumps(values), encoding="utf-8")
    fresh.replace(summary)
    for old in folder.glob(f"{unit.file}.*.safetensors"):
        if old != tensors:
            old.unlink()


def resume(unit: Unit[Any], stepper: Stepper, folder: Path | None) -> float:
    """Continue a run that was saved, if there is one, and return the seconds that it took until then."""
    summary = None if folder is None else folder / f"{unit.file}.json"
    if folder is None or summary is None or not summary.exists():
        return 0.0
    values = json.loads(summary.read_text(encoding="utf-8"))
    tensors = folder / f"{unit.file}.{values['done']}.safetensors"
    if values["key"] != unit.key or not tensors.exists():
        return 0.0
    stepper.done = int(values["done"])
    stepper.curve = Curve(**values["curve"])
    stepper.load(load_file(str(tensors)))
    log.info("a run of %s continues after %d epochs", unit.experiment, stepper.done)
    return float(values.get("seconds", 0.0))
