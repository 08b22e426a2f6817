"""GPTs in pipeline stages whose activations and gradients are compressed: loss against bits, and step times.

For loss, all stages run in one process with the messages of ``laconic.pipeline`` between them (a test shows that a real
pipeline gives the same bits). Step times are those of real pipelines over slow links.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from laconic.records import Record
from laconic_lab.studies.pipeline.claims import CLAIMS
from laconic_lab.studies.pipeline.experiments import EXPERIMENTS
from laconic_lab.studies.pipeline.plots import FIGURES, make_plots
from laconic_lab.studies.pipeline.results import Results
from laconic_lab.studies.pipeline.runner import run
from laconic_lab.studies.pipeline.tables import make_tables
from laconic_lab.studies.study import Study
from laconic_lab.studies.text_runs import text_options

__all__ = ["STUDY"]


def _counts(records: Sequence[Record]) -> dict[str, Any]:
    return {"runs": len(records)}


STUDY = Study(
    "pipeline", "Pipelines with compressed activations", EXPERIMENTS, CLAIMS, Results, run, make_tables, make_plots,
    FIGURES,
    flags=("models", "methods", "seeds", "iterations", "links"),
    options=lambda given: text_options(given, ("models", "methods", "links")),
    counts=_counts,
)  # fmt: skip
