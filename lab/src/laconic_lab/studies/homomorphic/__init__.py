"""Homomorphic compression, as Jang, Na and Yoon 2017 assume it ("Homomorphic Parameter Compression"), measured.

Messages that are summed while compressed, layers of fewer parameters, and both together: what they lose, what they
send, what they cost to compute, and where the paper's bound is met.
"""

from __future__ import annotations

from laconic_lab.studies.homomorphic.claims import CLAIMS
from laconic_lab.studies.homomorphic.experiments import EXPERIMENTS
from laconic_lab.studies.homomorphic.plots import FIGURES, make_plots
from laconic_lab.studies.homomorphic.results import SERVER_RUN, Results
from laconic_lab.studies.homomorphic.runner import run
from laconic_lab.studies.homomorphic.tables import make_tables
from laconic_lab.studies.study import Study, compared_frames, training_options

__all__ = ["STUDY"]

STUDY = Study(
    "homomorphic", "Homomorphic compression", EXPERIMENTS, CLAIMS, Results, run, make_tables, make_plots, FIGURES,
    flags=("models", "seeds", "lanes", "epochs", "data"),
    options=lambda given: training_options(given, ()) | {"models": given["models"] and given["models"].split(",")},
    counts=compared_frames,
    related={SERVER_RUN: "kothari2021/accuracy.jsonl"},
)  # fmt: skip
