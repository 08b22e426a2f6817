"""Byte-level GPTs trained by many workers over slow links: what each method loses, and what it sends.

K workers are trained in one process on one GPU; messages are computed and sampled as real frames. Bytes count both
directions and headers, beside 8 bytes a parameter a step of float32 data parallelism.
"""

from __future__ import annotations

from laconic_lab.studies.gpt.claims import CLAIMS
from laconic_lab.studies.gpt.experiments import EXPERIMENTS
from laconic_lab.studies.gpt.plots import FIGURES, make_plots
from laconic_lab.studies.gpt.results import Results
from laconic_lab.studies.gpt.runner import run
from laconic_lab.studies.gpt.tables import make_tables
from laconic_lab.studies.study import Study, compared_frames
from laconic_lab.studies.text_runs import text_options

__all__ = ["STUDY"]


STUDY = Study(
    "gpt", "Transformers over slow links", EXPERIMENTS, CLAIMS, Results, run, make_tables, make_plots, FIGURES,
    flags=("models", "methods", "seeds", "iterations"),
    options=text_options,
    counts=compared_frames,
)  # fmt: skip
