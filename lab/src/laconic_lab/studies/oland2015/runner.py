"""Runs the experiments: units without a Record are trained in batches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from laconic.errors import ConfigError
from laconic.records import Record
from laconic.train.data import Images, load
from laconic.train.devices import device_of
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.oland2015 import buckets, coding, experiments
from laconic_lab.studies.oland2015.results import KIND
from laconic_lab.studies.oland2015.settings import EPOCHS, NUM_WEIGHTS, CommonSettings, Setting
from laconic_lab.studies.oland2015.trials import Unit, train
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.study import check_experiment
from laconic_lab.studies.trainer import Counter, Progress

__all__ = ["run"]

REAL_PACKETS = 8
"""On a CPU up to so many runs of a setting exchange real frames; more are computed as one batch."""

RUNS = dict.fromkeys(experiments.TRAINED, 8) | {"headline": 1500, "fixed": 50, "grid": 50, "entropy": 50, "coding": 3}
RUNS_ON_CPU = 2
EPOCHS_BY_STEP = 10
"""Epochs with an exchange after every mini-batch, which takes a hundred times as long."""

MEMORY_SHARE = 0.6
FIXED_BYTES = 4 << 30
CPU_BYTES = 1 << 30
MOST_RUNS = 1500
"""Most runs of a batch: more are no faster, and an interruption loses a batch."""


def run(
    experiment: str = "headline", *, runs: int | None = None, epochs: int | None = None, workers: int = 5,
    data: str | Images = "digits", data_dir: Path | None = None, device: str = "auto", seed: int = 0,
    batch_runs: int | None = None, real_packets: bool | None = None, default: Setting | None = None,
    settings: Sequence[Setting] | None = None, records: Path | None = None, progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> list[Record]:  # fmt: skip
    """Run an experiment and return its Records; what is in the Records already is not trained again.

    Args:
        experiment: One of ``EXPERIMENTS``.
        runs: Runs of each setting; by default the paper's number on a GPU and a few on a CPU.
        epochs: Passes over the images; 100 by default, 10 where gradients are exchanged.
        workers: Workers with exclusive shares of the images.
        data: ``digits``, ``mnist``, or loaded images.
        data_dir: Folder of the files of ``mnist``.
        device: ``auto``, ``cpu`` or ``cuda``.
        batch_runs: Runs trained at once; by default as many as fit into memory.
        real_packets: Whether real frames are exchanged; by default on a CPU with few runs.
        default: Hyper-parameters that the experiment does not vary.
        settings: Replaces the settings of the experiment.
        records: Folder in which Records are kept, one file for each experiment.
        deadline: When to end although work is left, after a batch of runs.
    """
    check_experiment(experiment, experiments.EXPERIMENTS)
    deadline = deadline or Deadline()
    where = device_of(device)
    epochs = epochs if epochs is not None else EPOCHS_BY_STEP if experiment == "gradients" else EPOCHS
    few = RUNS.get(experiment, 1) if where.type == "cuda" or experiment == "coding" else RUNS_ON_CPU
    runs = runs if runs is not None else few
    if runs < 1 or (batch_runs is not None and batch_runs < 1):
        raise ConfigError(f"runs and batch_runs must be at least 1, got {runs} and {batch_runs}")
    images = data if isinstance(data, Images) else load(data, data_dir)
    if experiment == "buckets":
        return buckets.run_all(images, RecordLog.of_experiment(records, experiment), progress, deadline=deadline)
    common = CommonSettings(images.name, workers, epochs, seed, default or Setting())
    if experiment == "coding":
        return _coding(common, runs, images, RecordLog.of_experiment(records, experiment), deadline)
    chosen = settings or list(experiments.settings_of(experiment, common.default))
    units = experiments.units_of(experiment, chosen, runs)
    finished = RecordLog.of_experiment(records, experiment)
    missing = [unit for unit in units if unit.key(common) not in finished]
    counter = Counter(experiment, sum(unit.runs for unit in units) * epochs, progress)
    counter.add(counter.total - sum(unit.runs for unit in missing) * epochs)
    if real_packets is None:
        real_packets = where.type == "cpu" and runs <= REAL_PACKETS
    for batch in batched(missing, batch_runs or fitting_runs(where, common)):
        deadline.check()
        for series in train(common, batch, images, where, real_packets=real_packets, tick=counter.add):
            values = {"key": series.unit.key(common), "device": where.type} | common.values() | series.unit.values()
            finished.add(Record(KIND, values | series.values(), seed=seed))
    return [finished.records[unit.key(common)] for unit in units]


def _coding(common: CommonSettings, runs: int, images: Images, finished: RecordLog, deadline: Deadline) -> list[Record]:
    keys = [
        json.dumps(["coding", common.values(), common.default.values(), run], sort_keys=True) for run in range(runs)
    ]
    if not all(key in finished for key in keys):
        deadline.check()
        for run, (key, values) in enumerate(zip(keys, coding.measure(common, runs, images), strict=True)):
            known = {"key": key, "part": "coding", "run": run, "device": "cpu"} | common.values()
            finished.add(Record(coding.KIND, known | values, seed=common.seed))
    return [finished.records[key] for key in keys]


def fitting_runs(device: torch.device, common: CommonSettings) -> int:
    """Return how many runs fit into memory at once."""
    cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE - FIXED_BYTES if cuda else CPU_BYTES
    batch = common.default.batch
    # Weights of every worker, one gradient, activations and their derivatives in training and testing.
    per_run = 4 * (NUM_WEIGHTS * (common.workers + 1) + 2 * 500 * max(batch, 1000))
    return max(1, min(MOST_RUNS, int(free) // per_run))


def batched(units: Sequence[Unit], most_runs: int) -> Iterator[list[Unit]]:
    """Yield batches of units that share a network, with at most so many runs; a larger unit is a batch of its own."""
    groups: dict[tuple[object, ...], list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.group, []).append(unit)
    for group in groups.values():
        batch: list[Unit] = []
        for unit in group:
            if batch and sum(other.runs for other in batch) + unit.runs > most_runs:
                yield batch
                batch = []
            batch.append(unit)
        yield batch
