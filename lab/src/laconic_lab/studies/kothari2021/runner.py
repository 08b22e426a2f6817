"""Runs the experiments: what has no Record yet is trained or measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from laconic.errors import ConfigError
from laconic.records import Record
from laconic.train.devices import device_of
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.kothari2021 import experiments, scaling, sizes, times, trainings
from laconic_lab.studies.kothari2021.framed import FrameStepper, LocalFrameStepper
from laconic_lab.studies.kothari2021.results import ROUND, RUN
from laconic_lab.studies.kothari2021.settings import HYPER, Setting
from laconic_lab.studies.kothari2021.stepper import BestStepper, ComputedStepper, LocalStepper, can_compute
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.stepper import Source, Stepper
from laconic_lab.studies.study import check_experiment
from laconic_lab.studies.trainer import Counter, Progress, Unit, batched, run_units, train

__all__ = ["run"]

EPOCHS = {model: hyper.epochs for model, hyper in HYPER.items()}
"""The paper's."""
GRADIENTS = {"sizes": 1, "resnet50": sizes.ROUNDS}
"""Experiments that train nothing but encode gradients, and the number of rounds: times need several."""
RUNS_AT_ONCE = 8
"""Runs that share a GPU by default."""


def run(
    experiment: str = "accuracy", *, models: Sequence[str] = ("lenet5", "vgg11"), methods: Sequence[str] | None = None,
    epochs: int | None = None, seeds: Sequence[int] | None = None, data: str | None = None,
    data_dir: Path | None = None, device: str = "auto", lanes: int | None = None, frames: bool | None = None,
    settings: Sequence[Setting] | None = None, timing: times.Plan | None = None, records: Path | None = None,
    progress: Progress | None = None, deadline: Deadline | None = None,
) -> list[Record]:  # fmt: skip
    """Run an experiment and return its Records; what is in the Records already is not run again.

    Args:
        experiment: One of ``EXPERIMENTS``.
        models: Some of ``lenet5``, ``vgg11``, ``vgg11fc`` and ``resnet50``; ``workers`` has LeNet-5 alone.
        methods: By default all, or those of the experiment.
        epochs: Passes over the images; by default the paper's 20 for LeNet-5 and 50 for VGG-11. The experiment
            ``times`` only extrapolates to them.
        seeds: By default 0 to 2 for ``accuracy`` and ``adaptive``, 0 for the others.
        data: Another data set than the paper's, such as ``digits`` for LeNet-5.
        device: ``auto``, ``cpu`` or ``cuda``.
        lanes: Runs side by side; by default 8 on a GPU and 1 on a CPU.
        frames: Whether to make every frame even where its decoded values can be computed; by default on a CPU, where
            that is faster.
        settings: Replaces the settings of the experiment.
        timing: How long the experiment ``times`` measures.
        records: Folder in which Records are kept, one file for each experiment; unfinished runs are in ``partial``.
        deadline: When to end although work is left, after an epoch or a measurement.
    """
    check_experiment(experiment, experiments.EXPERIMENTS)
    if epochs is not None and epochs < 1:
        raise ConfigError(f"epochs must be at least 1, got {epochs}")
    deadline = deadline or Deadline()
    where = device_of(device)
    framed = where.type == "cpu" if frames is None else frames
    chosen = list(settings) if settings is not None else experiments.settings_of(experiment, models, methods, data)
    if experiment == times.EXPERIMENT:
        return times.measure_all(
            list(chosen), timing or times.Plan(), epochs=epochs, data_dir=data_dir, progress=progress,
            records=RecordLog.of_experiment(records, experiment), deadline=deadline,
        )  # fmt: skip
    if experiment in trainings.EXPERIMENTS:
        return trainings.train_all(
            list(trainings.cases_of(experiment, methods, data)), epochs=epochs, data_dir=data_dir, progress=progress,
            records=RecordLog.of_experiment(records, experiment), seeds=seeds or (0,), deadline=deadline,
        )  # fmt: skip
    units = [
        Unit(experiment, setting, epochs or EPOCHS.get(setting.model, 10), seed)
        for setting in chosen
        for seed in experiments.seeds_of(experiment, setting, seeds)
    ]

    def work(missing: list[Unit[Setting]], counter: Counter) -> Iterator[tuple[Unit[Setting], dict[str, Any]]]:
        if experiment in GRADIENTS:
            model = missing[0].setting.model if missing else ""
            gradients = [sizes.gradients_of(model, 0, worker) for worker in range(2)] if missing else []
            for unit in missing:
                deadline.check()
                yield unit, sizes.measure(unit.setting, gradients, rounds=GRADIENTS[experiment])
                counter.add(unit.epochs)
        elif experiment == "workers":
            for unit in missing:
                deadline.check()
                yield unit, scaling.train(unit.setting, unit.seed, unit.epochs, data_dir, counter.add)
        else:
            for batch in batched(missing, lanes or (RUNS_AT_ONCE if where.type == "cuda" else 1)):
                make = partial(make_stepper, frames=framed)
                yield from train(batch, where, data_dir, make, records, counter.add, deadline)

    kind = ROUND if experiment in GRADIENTS else RUN
    return run_units(units, RecordLog.of_experiment(records, experiment), kind, where, progress, work)


def make_stepper(unit: Unit[Setting], source: Source, *, frames: bool = False) -> Stepper:
    """Return the fastest stepper that can train a unit, or the one that makes every frame."""
    computed, job = can_compute(unit.setting), unit.setting.job(unit.seed)
    kind: type[Stepper] = FrameStepper
    if job.every > 1 and not frames:
        of_best = BestStepper if job.after == "best" else LocalStepper
        kind = of_best if computed else LocalFrameStepper
    elif computed and not frames:
        kind = ComputedStepper
    return kind(unit.setting, unit.seed, unit.epochs, source)
