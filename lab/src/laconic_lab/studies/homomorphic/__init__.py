"""Homomorphic compression, measured: what Jang, Na and Yoon 2017 ("Homomorphic Parameter Compression") posit.

Messages that are summed while compressed, models whose layers live in fewer numbers, and both: what they lose, what
they send, what they cost to compute, and where the paper's bound is met.
"""

from __future__ import annotations

from laconic_lab.studies.homomorphic.experiments import PARTS
from laconic_lab.studies.homomorphic.figures import draw
from laconic_lab.studies.homomorphic.report import GOALS, Finding, Goal, Results, findings, load, tables
from laconic_lab.studies.homomorphic.settings import HYPER, Setting, setting_of
from laconic_lab.studies.homomorphic.study import run

__all__ = [
    "GOALS",
    "HYPER",
    "PARTS",
    "Finding",
    "Goal",
    "Results",
    "Setting",
    "draw",
    "findings",
    "load",
    "run",
    "setting_of",
    "tables",
]
