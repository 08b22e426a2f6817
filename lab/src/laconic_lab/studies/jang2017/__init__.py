"""Jang, Na and Yoon 2017, "Homomorphic parameter compression for distributed deep learning training".

The paper has a model of time, a table of what gzip costs, and curves of the gain from a compression that computes on
compressed values, but no such method. The study repeats the table and the curves, also with the measured cost of
laconic's layers, profiles AlexNet, and compares the planner, which grew out of the model, with real runs.
"""

from __future__ import annotations

from laconic_lab.studies.jang2017.claims import CLAIMS
from laconic_lab.studies.jang2017.plots import FIGURES, make_plots
from laconic_lab.studies.jang2017.results import GPU_STEP, LAYERS, Results
from laconic_lab.studies.jang2017.runner import EXPERIMENTS, run
from laconic_lab.studies.jang2017.tables import make_tables
from laconic_lab.studies.study import Study

__all__ = ["STUDY"]

STUDY = Study(
    "jang2017", "Jang, Na and Yoon 2017: a model of time, and real runs",
    EXPERIMENTS, CLAIMS, Results, run, make_tables, make_plots, FIGURES,
    flags=("data", "links"),
    options=lambda given: {
        "data": given["data"] or "digits", "links": given["links"] and given["links"].split(","),
    },
    counts=lambda records: {"runs": len(records)},
    related={LAYERS: "layers/cpu.jsonl", GPU_STEP: "homomorphic/speed.jsonl"},
)  # fmt: skip
