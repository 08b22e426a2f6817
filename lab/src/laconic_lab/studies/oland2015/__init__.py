"""Øland and Raj 2015, "Reducing communication overhead in distributed learning by an order of magnitude (almost)".

Five workers train one small network on exclusive shares of MNIST and average their weights after every epoch, quantized
to as many levels as their entropy asks for, and coded. Here: all of the paper's experiments, with the hyper-parameters
that it leaves open as dimensions of their own, and what it takes to keep the method from failing.
"""

from __future__ import annotations

from laconic_lab.studies.claims import Claim
from laconic_lab.studies.oland2015.claims import CLAIMS
from laconic_lab.studies.oland2015.experiments import PARTS
from laconic_lab.studies.oland2015.figures import draw
from laconic_lab.studies.oland2015.report import Finding, Results, findings, load, tables
from laconic_lab.studies.oland2015.settings import Quantizer, Setting, Study
from laconic_lab.studies.oland2015.study import run

__all__ = [
    "CLAIMS",
    "PARTS",
    "Claim",
    "Finding",
    "Quantizer",
    "Results",
    "Setting",
    "Study",
    "draw",
    "findings",
    "load",
    "run",
    "tables",
]
