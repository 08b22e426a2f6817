"""Øland and Raj 2015, "Reducing communication overhead in distributed learning by an order of magnitude (almost)".

Five workers train one small network on exclusive shares of MNIST and average their weights after every epoch, quantized
to a number of levels that follows their entropy, and Huffman-coded. The study repeats all experiments, varies the
hyper-parameters that the paper leaves open, and shows how to keep the method from failing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.records import Record
from laconic_lab.studies.oland2015.claims import CLAIMS
from laconic_lab.studies.oland2015.experiments import EXPERIMENTS
from laconic_lab.studies.oland2015.plots import FIGURES, make_plots
from laconic_lab.studies.oland2015.results import Results
from laconic_lab.studies.oland2015.runner import run
from laconic_lab.studies.oland2015.settings import Setting
from laconic_lab.studies.oland2015.tables import make_tables
from laconic_lab.studies.study import Study

__all__ = ["STUDY"]

HYPER = ("lr", "decay", "l1", "batch")


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    default = Setting(**{name: given[name] for name in HYPER if given[name] is not None})
    arguments = {name: given[name] for name in ("runs", "epochs", "workers", "seed", "data") if given[name] is not None}
    return {**arguments, "default": default}


def _counts(records: Sequence[Record]) -> dict[str, Any]:
    names = ("packets_other_values", "packets_other_sizes")
    differing = sum(record.values.get(name, 0) for record in records for name in names)
    return {"runs": sum(record.values.get("runs", 1) for record in records), "packets_that_differ": differing}


STUDY = Study(
    "oland2015", "Øland and Raj 2015: the number of bits follows from the entropy",
    EXPERIMENTS, CLAIMS, Results, run, make_tables, make_plots, FIGURES,
    flags=("runs", "epochs", "workers", "seed", "data", *HYPER),
    options=_options,
    counts=_counts,
)  # fmt: skip
