"""Runs the experiments: what has no Record yet is trained or timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from laconic.errors import ConfigError
from laconic.records import Record
from laconic.train.devices import device_of
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.gpt.text import load_corpus
from laconic_lab.studies.pipeline.experiments import EXPERIMENTS, SEEDS, TIMES, settings_of
from laconic_lab.studies.pipeline.times import time_steps
from laconic_lab.studies.pipeline.training import Training
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.study import check_experiment
from laconic_lab.studies.text_runs import train_each
from laconic_lab.studies.trainer import Progress, fast_products

__all__ = ["KIND", "run"]

KIND = "pipeline.run"
CORPUS_BYTES = 16_000_000
"""More than the steps read; reading all of the interpreter's packages takes longer than a run on a CPU."""


def run(
    experiment: str = "bits", *, models: Sequence[str] | None = None, methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None, iterations: int | None = None, links: Sequence[str] | None = None,
    data_dir: Path | None = None, device: str = "auto", records: Path | None = None, progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> list[Record]:  # fmt: skip
    """Run an experiment and return its Records.

    Args:
        models: Sizes to train instead of the experiment's own.
        methods: Only methods whose names contain one of these texts.
        seeds: Seeds of initial parameters and data; by default the experiment's.
        iterations: Steps of each run instead of the experiment's.
        links: ``times``: rates, such as ``100mbit``, or ``unshaped``.
        data_dir: Folder of text files; by default the Python sources of the interpreter are the text.
        records: Folder of Records; a run with a Record is not repeated.
        deadline: When to end although work is left.
    """
    check_experiment(experiment, EXPERIMENTS)
    deadline = deadline or Deadline()
    log = RecordLog.of_experiment(records, experiment)
    if experiment == TIMES:
        return time_steps(log, methods=methods, links=links, steps=iterations, progress=progress, deadline=deadline)
    if links is not None:
        raise ConfigError(f"--links is an option of --part {TIMES}")
    chosen = seeds if seeds is not None else SEEDS.get(experiment, (0,))
    where, corpus = device_of(device), load_corpus(data_dir, max_bytes=CORPUS_BYTES)
    with fast_products(where):
        return train_each(
            lambda setting, seed, report: Training(setting, seed, corpus, where).run(report),
            settings_of(experiment, models, methods), chosen, log, kind=KIND,
            experiment=experiment, corpus=corpus, known={"device": where.type}, iterations=iterations,
            progress=progress, deadline=deadline,
        )  # fmt: skip
