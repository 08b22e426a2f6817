"""Runs the experiments: what has no Record yet is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from laconic.records import Record
from laconic.train.devices import device_of
from laconic_lab.studies.gpt.experiments import EXPERIMENTS, SEEDS, settings_of
from laconic_lab.studies.gpt.settings import Setting
from laconic_lab.studies.gpt.text import load_corpus
from laconic_lab.studies.gpt.training import Training
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.study import check_experiment
from laconic_lab.studies.text_runs import train_each
from laconic_lab.studies.trainer import Progress

__all__ = ["KIND", "run"]

KIND = "gpt.run"


def run(
    experiment: str = "frontier", *, models: Sequence[str] | None = None, methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None, iterations: int | None = None, data_dir: Path | None = None,
    device: str = "auto", settings: Sequence[Setting] | None = None, records: Path | None = None,
    progress: Progress | None = None,
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
    """
    check_experiment(experiment, EXPERIMENTS)
    where, log, corpus = device_of(device), RecordLog.of_experiment(records, experiment), load_corpus(data_dir)
    known = {"device": where.type, "corpus_bytes": corpus.train.numel() + corpus.validation.numel()}
    return train_each(
        lambda setting, seed, report: Training(setting, seed, corpus, where).run(report),
        settings if settings is not None else settings_of(experiment, models, methods),
        SEEDS.get(experiment, (0,)) if seeds is None else seeds, log, kind=KIND, experiment=experiment, corpus=corpus,
        known=known, iterations=iterations, progress=progress,
    )  # fmt: skip
