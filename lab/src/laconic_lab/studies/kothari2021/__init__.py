"""Kothari, Kaushik and Faisal 2021, "Communication cost in distributed deep learning: a comprehensive survey".

Six ways to exchange gradients or weights through a parameter server, on LeNet-5 and VGG-11. Here: the same six, ours
beside them, what each ingredient of ours is worth, and how few bytes suffice.
"""

from __future__ import annotations

from laconic_lab.studies.claims import Claim
from laconic_lab.studies.kothari2021.claims import CLAIMS
from laconic_lab.studies.kothari2021.experiments import PARTS
from laconic_lab.studies.kothari2021.figures import draw
from laconic_lab.studies.kothari2021.report import Finding, Results, findings, load, tables
from laconic_lab.studies.kothari2021.settings import HYPER, Setting, setting_of
from laconic_lab.studies.kothari2021.study import run
from laconic_lab.studies.kothari2021.times import Plan

__all__ = [
    "CLAIMS",
    "HYPER",
    "PARTS",
    "Claim",
    "Finding",
    "Plan",
    "Results",
    "Setting",
    "draw",
    "findings",
    "load",
    "run",
    "setting_of",
    "tables",
]
