"""Runs the experiments: what has no Record yet is trained or timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from laconic.errors import ConfigError
from laconic.records import Record
from laconic.train.devices import device_of
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.homomorphic import speed
from laconic_lab.studies.homomorphic.experiments import EXPERIMENTS, seeds_of, settings_of
from laconic_lab.studies.homomorphic.results import KIND
from laconic_lab.studies.homomorphic.settings import HYPER, Setting
from laconic_lab.studies.homomorphic.stepper import SummedStepper
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.study import check_experiment
from laconic_lab.studies.trainer import Counter, Progress, Unit, batched, run_units, train

__all__ = ["run"]

RUNS_AT_ONCE = 6
"""Runs that share a GPU by default."""


def run(
    experiment: str = "sums", *, models: Sequence[str] | None = None, epochs: int | None = None,
    seeds: Sequence[int] | None = None, data: str | None = None, data_dir: Path | None = None, device: str = "auto",
    lanes: int | None = None, settings: Sequence[Setting] | None = None, records: Path | None = None,
    progress: Progress | None = None, deadline: Deadline | None = None,
) -> list[Record]:  # fmt: skip
    """Run an experiment and return its Records; ``kothari2021.runner.run`` describes the arguments.

    Models are ``mlp``, ``lenet5``, ``vgg11`` and ``vgg11fc``, with 10 epochs, or 20 for VGG-11; ``speed`` has its own
    models and layers, ``speed.BATCHES``. Seeds are 0 to 2 for the MLP and the goals of VGG-11, otherwise 0. On a CPU
    sums are made of real frames.
    """
    check_experiment(experiment, EXPERIMENTS)
    if epochs is not None and epochs < 1:
        raise ConfigError(f"epochs must be at least 1, got {epochs}")
    deadline = deadline or Deadline()
    where, finished = device_of(device), RecordLog.of_experiment(records, experiment)
    if experiment == "speed":
        return speed.measure_all(where, finished, progress, models, deadline)
    chosen = list(settings) if settings is not None else settings_of(experiment, models or tuple(HYPER), data)
    units = [
        Unit(experiment, setting, epochs or HYPER[setting.model].epochs, seed)
        for setting in chosen
        for seed in seeds_of(experiment, setting, seeds)
    ]

    def work(missing: list[Unit[Setting]], counter: Counter) -> Iterator[tuple[Unit[Setting], dict[str, Any]]]:
        for batch in batched(missing, lanes or (RUNS_AT_ONCE if where.type == "cuda" else 1)):
            yield from train(
                batch, where, data_dir,
                lambda unit, source: SummedStepper(unit.setting, unit.seed, unit.epochs, source), records, counter.add,
                deadline,
            )  # fmt: skip

    return run_units(units, finished, KIND, where, progress, work)
