"""Choose codecs for a model of one's own: short trainings of it by several candidates.

``tune`` trains copies of a model with simulated workers in one process, which exchange real frames, and compares their
loss with that of plain data parallelism. What it finds is evidence for ``laconic.plan``.
"""

from __future__ import annotations

from laconic.tuning.exchange import SimulatedExchange
from laconic.tuning.search import CANDIDATES, Tuning, tune
from laconic.tuning.training import Outcome

__all__ = ["CANDIDATES", "Outcome", "SimulatedExchange", "Tuning", "tune"]
