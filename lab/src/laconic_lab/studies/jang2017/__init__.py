"""Jang, Na and Yoon 2017, "Homomorphic parameter compression for distributed deep learning training".

A model of time, a table of what gzip costs, and curves of what a compression would bring that computes with what it has
compressed; no such method. Here: the table and the curves again, the curves with what laconic's layers were measured
to be, where AlexNet's time goes, and the planner that grew out of the model against real runs.
"""

from __future__ import annotations

from laconic_lab.studies.claims import Claim
from laconic_lab.studies.jang2017.claims import CLAIMS
from laconic_lab.studies.jang2017.figures import FIGURES, draw
from laconic_lab.studies.jang2017.report import Finding, Results, findings, load, tables
from laconic_lab.studies.jang2017.study import PARTS, run

__all__ = [
    "CLAIMS",
    "FIGURES",
    "PARTS",
    "Claim",
    "Finding",
    "Results",
    "draw",
    "findings",
    "load",
    "run",
    "tables",
]
