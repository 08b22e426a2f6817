"""Kothari, Kaushik and Faisal 2021, "Communication cost in distributed deep learning: a comprehensive survey".

Six ways to exchange gradients or weights through a parameter server, on LeNet-5 and VGG-11. Here: the same six, ours
beside them, what each ingredient of ours is worth, and how few bytes suffice.
"""

from __future__ import annotations

from laconic.studies.claims import Claim
from laconic.studies.kothari2021.claims import CLAIMS
from laconic.studies.kothari2021.figures import draw
from laconic.studies.kothari2021.parts import PARTS
from laconic.studies.kothari2021.report import Finding, Results, findings, load, tables
from laconic.studies.kothari2021.settings import HYPER, Setting, setting_of
from laconic.studies.kothari2021.study import run
from laconic.studies.kothari2021.times import Plan

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
