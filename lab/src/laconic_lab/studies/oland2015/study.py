"""Run the study: plan what is missing, train it in batches, write a Record for each unit as it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from laconic.errors import ConfigError
from laconic.records import Record
from laconic.train.data import Images, load
from laconic_lab.studies.oland2015 import experiments
from laconic_lab.studies.oland2015.record_log import Ledger
from laconic_lab.studies.oland2015.settings import NUM_WEIGHTS, Setting, Study
from laconic_lab.studies.oland2015.trials import Unit, train

__all__ = ["KIND", "run"]

KIND = "study.oland2015"

Progress = Callable[[str, int, int], None]
"""Called with what is being trained, the run-epochs done and those in all."""

REAL_PACKETS = 8
"""Up to so many runs of a setting exchange real frames on a CPU; more are computed as one batch."""

RUNS = dict.fromkeys(experiments.PARTS, 8) | {"headline": 1500, "fixed": 50, "grid": 50, "entropy": 50}
RUNS_ON_CPU = 2
EPOCHS, EPOCHS_BY_STEP = 100, 10
"""Exchanging after every mini-batch takes a hundred times as long."""

MEMORY_SHARE = 0.6
FIXED_BYTES = 4 << 30
CPU_BYTES = 1 << 30
MOST_RUNS = 1500
"""More at once are no faster, and a batch is what an interruption costs."""


def run(
    part: str = "headline",
    *,
    runs: int | None = None,
    epochs: int | None = None,
    workers: int = 5,
    data: str | Images = "digits",
    data_dir: Path | None = None,
    device: str = "auto",
    seed: int = 0,
    batch_runs: int | None = None,
    real_packets: bool | None = None,
    default: Setting | None = None,
    settings: Sequence[Setting] | None = None,
    records: Path | None = None,
    progress: Progress | None = None,
) -> list[Record]:
    """Train what a part asks for and is not in the Records yet; all of the part's Records.

    Args:
        part: One of ``PARTS``.
        runs: Runs of each setting; by default the paper's number on a GPU and a few on a CPU.
        epochs: Passes over the images; 100 by default, 10 where gradients travel.
        workers: Workers with exclusive shares.
        data: ``digits``, ``mnist``, or images at hand.
        data_dir: Where the files of ``mnist`` lie.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: Of everything random.
        batch_runs: Runs trained at once; by default what memory holds.
        real_packets: Exchange real frames; by default on a CPU with few runs.
        default: Hyper-parameters wherever the part does not vary them.
        settings: Instead of the part's own.
        records: A folder: Records are kept in ``PART.jsonl`` there and found again.
        progress: Told how far it is.
    """
    if part not in experiments.PARTS:
        raise ConfigError(f"unknown part {part!r}: expected one of {', '.join(experiments.PARTS)}")
    where = _device(device)
    epochs = epochs if epochs is not None else EPOCHS_BY_STEP if part == "gradients" else EPOCHS
    runs = runs if runs is not None else RUNS[part] if where.type == "cuda" else RUNS_ON_CPU
    if runs < 1 or (batch_runs is not None and batch_runs < 1):
        raise ConfigError(f"runs and batch_runs must be at least 1, got {runs} and {batch_runs}")
    images = data if isinstance(data, Images) else load(data, data_dir)
    study = Study(images.name, workers, epochs, seed, default or Setting())
    wanted = experiments.units_of(part, settings or list(experiments.settings_of(part, study.default)), runs)
    ledger = Ledger(records / f"{part}.jsonl" if records is not None else None)
    missing = [unit for unit in wanted if unit.key(study) not in ledger]
    total = sum(unit.runs for unit in wanted) * epochs
    done = total - sum(unit.runs for unit in missing) * epochs

    def tick(num_runs: int) -> None:
        nonlocal done
        done += num_runs
        if progress is not None:
            progress(part, done, total)

    tick(0)
    if real_packets is None:
        real_packets = where.type == "cpu" and runs <= REAL_PACKETS
    for batch in batched(missing, batch_runs or fitting_runs(where, study)):
        for series in train(study, batch, images, where, real_packets=real_packets, tick=tick):
            values = {"key": series.unit.key(study), "device": where.type} | study.values() | series.unit.values()
            ledger.add(Record(KIND, values | series.values(), seed=seed))
    return [ledger.records[unit.key(study)] for unit in wanted]


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is to be had here: use --device cpu")
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else name.replace("auto", "cpu"))


def fitting_runs(device: torch.device, study: Study) -> int:
    """How many runs fit into memory at once."""
    cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE - FIXED_BYTES if cuda else CPU_BYTES
    batch = study.default.batch
    # Weights of every worker, one gradient, activations and their derivatives in training and testing.
    per_run = 4 * (NUM_WEIGHTS * (study.workers + 1) + 2 * 500 * max(batch, 1000))
    return max(1, min(MOST_RUNS, int(free) // per_run))


def batched(units: Sequence[Unit], most_runs: int) -> Iterator[list[Unit]]:
    """Units of one company in order, as many at once as memory holds; a unit that is larger goes alone."""
    companies: dict[tuple[object, ...], list[Unit]] = {}
    for unit in units:
        companies.setdefault(unit.company, []).append(unit)
    for company in companies.values():
        batch: list[Unit] = []
        for unit in company:
            if batch and sum(one.runs for one in batch) + unit.runs > most_runs:
                yield batch
                batch = []
            batch.append(unit)
        yield batch
