"""Runs the experiments: what has no Record yet is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from laconic.records import Record
from laconic.train.devices import device_of
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.gpt.experiments import EXPERIMENTS, SEEDS, settings_of
from laconic_lab.studies.gpt.positions import measure_positions
from laconic_lab.studies.gpt.settings import Setting
from laconic_lab.studies.gpt.text import load_corpus
from laconic_lab.studies.gpt.training import Training
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.study import check_experiment
from laconic_lab.studies.text_runs import run_key, train_each
from laconic_lab.studies.trainer import Progress

__all__ = ["KIND", "run"]

KIND = "gpt.run"


def run(
    experiment: str = "frontier", *, models: Sequence[str] | None = None, methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None, iterations: int | None = None, data_dir: Path | None = None,
    device: str = "auto", settings: Sequence[Setting] | None = None, records: Path | None = None,
    progress: Progress | None = None, deadline: Deadline | None = None,
) -> list[Record]:  # fmt: skip
    """Run an experiment and return its Records.

    Args:
        models: Sizes to train instead of the experiment's own.
        methods: Only methods whose names contain one of these texts.
        seeds: Seeds of initial parameters and data; by default the experiment's.
        iterations: Steps of each run instead of the experiment's.
        data_dir: Folder of text files; by default the Python sources of the interpreter are the text.
        settings: Settings instead of the experiment's own.
        records: Folder of Records; a run with a Record is not repeated.
        deadline: When to end although trainings are left.
    """
    check_experiment(experiment, EXPERIMENTS)
    deadline = deadline or Deadline()
    where, log, corpus = device_of(device), RecordLog.of_experiment(records, experiment), load_corpus(data_dir)
    chosen = settings if settings is not None else settings_of(experiment, models, methods)
    counted = SEEDS.get(experiment, (0,)) if seeds is None else seeds
    if experiment == "positions":
        return measure_positions(chosen, log, corpus, where, iterations, deadline)
    if records is not None:
        _reuse(
            records,
            experiment,
            {run_key(each, experiment, seed, corpus.digest) for each in chosen for seed in counted},
            log,
        )
    known = {"device": where.type, "corpus_bytes": corpus.train.numel() + corpus.validation.numel()}
    return train_each(
        lambda setting, seed, report: Training(setting, seed, corpus, where).run(report),
        chosen, counted, log, kind=KIND, experiment=experiment, corpus=corpus,
        known=known, iterations=iterations, progress=progress, deadline=deadline,
    )  # fmt: skip


def _reuse(folder: Path, experiment: str, keys: set[str], log: RecordLog) -> None:
    """Add runs of other experiments that are the same work: key and experiment change, nothing else does."""
    for other in EXPERIMENTS:
        if other == experiment:
            continue
        for key, record in RecordLog.of_experiment(folder, other).records.items():
            mine = json.dumps([experiment, *json.loads(key)[1:]], sort_keys=True)
            if mine in keys and mine not in log:
                log.add(replace(record, values={**record.values, "key": mine, "part": experiment}))
