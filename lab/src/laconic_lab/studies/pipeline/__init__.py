"""GPTs in pipeline stages whose activations and gradients are compressed: loss against bits, and step times.

For loss, all stages run in one process with the messages of ``laconic.pipeline`` between them (a test shows that a real
pipeline gives the same bits). Step times are those of real pipelines over slow links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.records import Record
from laconic_lab.studies.pipeline.claims import CLAIMS
from laconic_lab.studies.pipeline.experiments import EXPERIMENTS
from laconic_lab.studies.pipeline.plots import FIGURES, make_plots
from laconic_lab.studies.pipeline.results import Results
from laconic_lab.studies.pipeline.runner import run
from laconic_lab.studies.pipeline.tables import make_tables
from laconic_lab.studies.study import Study, seeds_option

__all__ = ["STUDY"]


def options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate options of the command line into arguments of ``run``."""
    lists = {name: given[name].split(",") if given[name] else None for name in ("models", "methods", "links")}
    return {**lists, "seeds": seeds_option(given), "iterations": given["iterations"]}


def _counts(records: Sequence[Record]) -> dict[str, Any]:
    return {"runs": len(records)}


STUDY = Study(
    "pipeline", "Pipelines with compressed activations", EXPERIMENTS, CLAIMS, Results, run, make_tables, make_plots,
    FIGURES,
    flags=("models", "methods", "seeds", "iterations", "links"),
    options=options,
    counts=_counts,
)  # fmt: skip
