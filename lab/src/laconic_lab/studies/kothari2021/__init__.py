"""Kothari, Kaushik and Faisal 2021, "Communication cost in distributed deep learning: a comprehensive survey".

Six ways to exchange gradients or weights through a parameter server, on LeNet-5 and VGG-11. The study repeats them,
compares ours with them, removes one ingredient of ours at a time, and searches for the fewest bytes that suffice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laconic_lab.studies.kothari2021.claims import CLAIMS
from laconic_lab.studies.kothari2021.experiments import EXPERIMENTS
from laconic_lab.studies.kothari2021.plots import FIGURES, make_plots
from laconic_lab.studies.kothari2021.results import Results
from laconic_lab.studies.kothari2021.runner import run
from laconic_lab.studies.kothari2021.settings import PAPER_MODELS
from laconic_lab.studies.kothari2021.tables import make_tables
from laconic_lab.studies.kothari2021.times import Plan
from laconic_lab.studies.kothari2021.verdicts import make_verdicts
from laconic_lab.studies.study import Study, compared_frames, training_options

__all__ = ["STUDY"]

TIMING = ("iterations", "cell_seconds", "turns")


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    links, methods = given["links"], given["methods"]
    timing = {"links": links and links.split(","), **{name: given[name] for name in TIMING}}
    return {
        **training_options(given, PAPER_MODELS),
        "methods": methods.split(",") if methods else None,
        "timing": Plan(**{name: value for name, value in timing.items() if value is not None}),
    }


STUDY = Study(
    "kothari2021", "Kothari, Kaushik and Faisal 2021: six methods and ours",
    EXPERIMENTS, CLAIMS, Results, run, make_tables, make_plots, FIGURES,
    flags=("models", "methods", "seeds", "lanes", "epochs", "data", "links", *TIMING),
    options=_options,
    counts=compared_frames,
    verdicts=make_verdicts,
)  # fmt: skip
