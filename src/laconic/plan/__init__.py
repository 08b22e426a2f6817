"""What compression is worth: models of time that move no tensor, and what they are fed with.

``Bound`` and ``Training`` are jang2017's model; ``step`` is laconic's own; ``simulate`` has workers that differ;
``advise`` compares codecs by a ``Profile`` of a machine, which ``laconic calibrate`` measures.
"""

from __future__ import annotations

from laconic.plan.bound import Bound
from laconic.plan.paper import Naive, Training, Update

__all__ = ["Bound", "Naive", "Training", "Update"]
