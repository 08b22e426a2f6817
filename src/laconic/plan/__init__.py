"""Models of training time, without tensors, and the measurements they need.

``recommend(PlanRequest(...))`` compares codecs by a ``Profile`` of a machine, which ``laconic calibrate`` measures.
``Bound`` and ``Training`` are the model of jang2017; ``simulation`` follows workers of different speeds.
"""

from __future__ import annotations

from laconic.plan.bound import Bound
from laconic.plan.evidence import Evidence
from laconic.plan.paper import Naive, Training, Update
from laconic.plan.profile import Profile
from laconic.plan.recommend import CompressedLayers, MeasuredRun, PlanRequest, Recommendation, recommend
from laconic.plan.sweep import sweep

__all__ = [
    "Bound", "CompressedLayers", "Evidence", "MeasuredRun", "Naive", "PlanRequest", "Profile", "Recommendation",
    "Training", "Update", "recommend", "sweep",
]  # fmt: skip
